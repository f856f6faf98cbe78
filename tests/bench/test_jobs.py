"""The trainings that loops are measured with, and the arithmetic of utilisation."""

from __future__ import annotations

import pytest
import torch

from distributed_training.bench.choosing import choose
from distributed_training.bench.flops import decoder_flops_per_token, peak_flops
from distributed_training.bench.jobs import JOBS
from distributed_training.config.errors import ConfigError


@pytest.mark.parametrize("name", ["mlp", "gpt-tiny"])
def test_a_job_is_the_same_every_time_and_can_be_learned(name: str) -> None:
    job = JOBS[name]
    first, again = (job.batches(torch.device("cpu")) for _ in range(2))
    assert all(torch.equal(a, b) for one, other in zip(first, again) for a, b in zip(one, other))
    model, twin = job.build(), job.build()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
    optimizer = job.optimizer(model)
    losses = []
    for batch in first[:40]:
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])


def test_arrays_hold_the_same_samples_as_batches() -> None:
    job = JOBS["mlp"]
    inputs, targets = job.arrays(3)
    assert torch.equal(inputs[64:128], job.batches(torch.device("cpu"))[1][0])
    assert torch.equal(targets[64:128], job.batches(torch.device("cpu"))[1][1])


def test_flops_of_gpt2_small_are_those_of_the_papers() -> None:
    job = JOBS["gpt2"]
    with torch.device("meta"):
        model = job.build()
    found = decoder_flops_per_token(model, 12, 768, 1024)
    # 124M parameters: 85.1M in blocks and norms, 38.6M in the tied embedding; attention adds 12 * 12 * 768 * 1024
    assert found == pytest.approx(6 * (85.06e6 + 50304 * 768) + 113.2e6, rel=2e-3)
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA L40S") == 362e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("NVIDIA RTX A4000") is None


def test_names_are_chosen_in_the_order_of_the_part_and_unknown_ones_refused() -> None:
    assert choose(("c", "a"), "abc", ["b"], "--cases") == ["a", "c"]
    assert choose((), "abc", ["b"], "--cases") == ["b"]
    with pytest.raises(ConfigError, match=r"--cases resnet5: .*did you mean resnet50"):
        choose(("resnet5",), ("resnet50", "mlp"), (), "--cases")
