"""A training records its steps, or how far it is from another record."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.training.examples import image_model, loader, model, trainer

from distributed_training.runtime.errors import RunDirectoryError
from distributed_training.training.recorder import nudged, read_weights
from distributed_training.verify.compare import Record, read_record


def record(folder: Path, net: torch.nn.Module | None = None, **settings: object) -> Record:
    trainer(net, record__folder=str(folder), **settings).train(loader(), epochs=2)
    found = read_record(folder)
    assert found is not None
    return found


def test_a_reference_holds_the_weights_of_every_step(tmp_path: Path) -> None:
    net = model()
    start = {name: value.clone() for name, value in net.state_dict().items()}
    found = record(tmp_path, net, run__stop_after_steps=8)
    assert sorted(found.steps) == list(range(9))
    assert found.facts["ranks"] == 1
    assert found.facts["exact"] is True
    assert found.facts["data"]["samples"] == 44
    assert found.steps[6]["ids"] != found.steps[7]["ids"]
    for step, expected in ((0, start), (8, net.state_dict())):
        weights = read_weights(tmp_path / "weights", step)
        assert weights is not None
        assert all(torch.equal(weights[0][name], value) for name, value in expected.items())
    assert read_weights(tmp_path / "weights", 9) is None


def test_the_same_training_again_does_not_differ_and_another_does(tmp_path: Path) -> None:
    first = record(tmp_path / "first")
    again = record(tmp_path / "again", record__against=str(tmp_path / "first"))
    assert {value for line in again.steps.values() for value in line["weights"].values()} == {0.0}
    assert [line.get("loss") for line in again.steps.values()] == [line.get("loss") for line in first.steps.values()]
    assert not (tmp_path / "again" / "weights").exists()
    other = record(tmp_path / "other", record__against=str(tmp_path / "first"), training__lr=0.051)
    assert max(other.steps[0]["weights"].values()) == 0
    assert min(other.steps[1]["weights"].values()) > 1e-5


def test_a_nudge_is_in_the_last_bit(tmp_path: Path) -> None:
    record(tmp_path / "first")
    found = record(tmp_path / "nudged", record__against=str(tmp_path / "first"), record__nudge=True)
    assert 1e-9 < max(found.steps[0]["weights"].values()) < 1.2e-7
    weights = {"w": torch.ones(1000), "n": torch.tensor(3)}
    assert torch.equal(nudged(weights)["w"], nudged(weights)["w"])
    assert nudged(weights)["n"] == 3
    assert 0 < (nudged(weights)["w"] - 1).abs().max() <= torch.finfo(torch.float32).eps


def test_tied_weights_are_recorded_under_each_name(tmp_path: Path) -> None:
    tied = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 3))
    tied.add_module("again", torch.nn.Identity())
    tied[2].weight = tied[1].weight
    found = record(tmp_path, tied, run__stop_after_steps=1)
    weights = read_weights(tmp_path / "weights", found.length)
    assert weights is not None
    assert torch.equal(weights[0]["again.weight"], weights[0]["1.weight"])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_it_is_noted_what_ranks_do_differently(tmp_path: Path, dropout: float) -> None:
    found = record(tmp_path / "plain", model(dropout), run__stop_after_steps=2)
    assert [found.steps[step]["random"] for step in (1, 2)] == [dropout > 0] * 2
    assert found.facts["batchnorm"] is False


def test_batch_norm_is_noted(tmp_path: Path) -> None:
    images = (torch.randn(8, 1, 4, 4), torch.zeros(8, dtype=torch.int64))
    trainer(image_model(), record__folder=str(tmp_path), training__batch_size=4).train(images, epochs=1)
    found = read_record(tmp_path)
    assert found is not None
    assert found.facts["batchnorm"] is True


def test_an_earlier_record_is_not_written_over(tmp_path: Path) -> None:
    record(tmp_path, run__stop_after_steps=1)
    with pytest.raises(RunDirectoryError, match="holds a record already"):
        record(tmp_path)


def test_no_record_where_there_is_none(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
