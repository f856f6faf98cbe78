"""TensorBoard files, read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.contract.tracker import Points, TrackerContract, run_info

from distributed_training.tracking.tensorboard import TensorBoardTracker

pytest.importorskip("tensorboard")


def read(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(directory / "tensorboard")).Reload()


class TestTensorBoardTracker(TrackerContract):
    def make(self) -> TensorBoardTracker:
        return TensorBoardTracker()

    def points(self, directory: Path) -> Points:
        reader = read(directory)
        return {name: [(e.step, e.value) for e in reader.Scalars(name)] for name in reader.Tags()["scalars"]}

    def test_a_resume_hides_what_is_trained_again(self, run_directory: Path) -> None:
        first = self.make()
        first.start(run_info(run_directory))
        for step in (10, 20, 30):
            first.log({"train_loss": 1.0}, step)
        first.finish("interrupted", {})
        second = self.make()
        second.start(run_info(run_directory, resumed_from=20))
        second.log({"train_loss": 0.5}, 30)
        second.finish("completed", {})
        assert self.points(run_directory)["train_loss"] == [(10, 1.0), (20, 1.0), (30, 0.5)]

    def test_config_facts_and_result_are_text(self, run_directory: Path) -> None:
        tracker = self.make()
        tracker.start(run_info(run_directory))
        tracker.finish("stopped early", {"val_loss": 0.25})
        reader = read(run_directory)

        def text(tag: str) -> str:
            return reader.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode()

        assert '"batch_size": 64' in text("config")
        assert '"host": "node-1"' in text("facts")
        assert '"status": "stopped early"' in text("result")
        assert all(line.startswith("    ") for line in text("config").splitlines())

    def test_finish_without_start_is_harmless(self) -> None:
        self.make().finish("failed", {})
