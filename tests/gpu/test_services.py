"""Validation and inference with the model on a GPU: the numbers are those of the same GPU without a network."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import torch
from tests.split.services import CLASSES, QUICK, WIDTH, arrays, network, serving
from tests.training.examples import trainer
from torch.utils.data import DataLoader, TensorDataset

from distributed_training.runtime.errors import FeedError
from distributed_training.split.inference import run_inference
from distributed_training.split.validation import run_validation


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_validation_is_as_on_the_gpu_alone(precision: str) -> None:
    data = arrays(5003)
    on_gpu = {"training__device": "cuda", "training__precision": precision}
    with closing(trainer(network(), **on_gpu)) as local:
        expected = local.evaluate(DataLoader(TensorDataset(*data), batch_size=64))
    with closing(trainer(network(), **on_gpu)) as served, serving("validation", served) as service:
        result = run_validation(data, service.link, batch_size=64, settings=QUICK)
    assert (result["average_loss"], result["accuracy"]) == (expected["loss"], expected["accuracy"])


def test_results_are_not_overwritten_while_the_next_batch_is_computed() -> None:
    data = arrays(20_000)
    with torch.no_grad():
        expected = network().eval().cuda()(data[0].cuda()).softmax(1).cpu().numpy()
    exact = {"training__device": "cuda", "training__precision": "fp32"}
    with closing(trainer(network(), **exact)) as served, serving("inference", served) as service:
        result = run_inference(data, service.link, batch_size=16, return_full_probabilities=True, settings=QUICK)
    np.testing.assert_allclose(result["probabilities"], expected, rtol=1e-4, atol=1e-6)


def test_a_label_that_is_no_class_does_not_put_the_gpu_out_of_order() -> None:
    data = arrays()
    wrong = (data[0], torch.full_like(data[1], CLASSES))
    settings = {"training__device": "cuda", "model__num_classes": CLASSES}
    with closing(trainer(network(), **settings)) as served, serving("validation", served) as service:
        with pytest.raises(FeedError, match=f"the label {CLASSES}, and the model knows the classes 0 to {CLASSES - 1}"):
            run_validation(wrong, service.link, settings=QUICK)
        with pytest.raises(FeedError, match="the model failed"):
            run_validation((torch.randn(8, WIDTH + 1), data[1][:8]), service.link, settings=QUICK)
        assert run_validation(data, service.link, settings=QUICK)["total_samples"] == len(data[0])
