"""W&B, the real library, offline: nothing here reaches for a network."""

from __future__ import annotations

import json
import os
import pty
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.tracker import Points, TrackerContract, run_info

from distributed_training.config import TrackingConfig
from distributed_training.tracking.wandb import WandbTracker

wandb = pytest.importorskip("wandb")


@pytest.fixture(autouse=True)
def private_wandb(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No key, no settings and no cache of the user's; no telemetry threads."""
    home = tmp_path_factory.mktemp("wandb-home")
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    for name in ("CONFIG", "CACHE", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def records(directory: Path) -> list[Any]:
    """All records of all parts of the run, in the order in which they were written."""
    from wandb.proto import wandb_internal_pb2

    files = sorted(directory.glob("wandb/*run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [wandb_internal_pb2.Record.FromString(data) for file in files for data in leveldb_log(file.read_bytes())]


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    block, whole, first_or_whole, last_or_whole = 32768, b"", (1, 2), (1, 4)
    position = 7
    while position + 7 <= len(data):
        if block - position % block < 7:  # too little left of the block for a header: padding
            position += block - position % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        part = data[position + 7 : position + 7 + length]
        whole = part if kind in first_or_whole else whole + part
        if kind in last_or_whole:
            yield whole
        position += 7 + length


class TestWandbTracker(TrackerContract):
    def make(self, **settings: Any) -> WandbTracker:
        return WandbTracker(TrackingConfig(mode="offline", **settings))

    def points(self, directory: Path) -> Points:
        points: Points = {}
        for record in records(directory):
            if record.WhichOneof("record_type") == "history":
                values = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                for name in values:
                    if not name.startswith("_"):
                        points.setdefault(name, []).append((values["_step"], values[name]))
        return points

    def test_a_resume_has_the_same_id_and_settings(self, run_directory: Path) -> None:
        for resumed_from, status in ((None, "interrupted"), (2, "completed")):
            tracker = self.make(project="p", entity="team", group="g", tags=["a", "b"])
            tracker.start(run_info(run_directory, resumed_from))
            tracker.finish(status, {"val_loss": 0.5})
        runs = [record.run for record in records(run_directory) if record.WhichOneof("record_type") == "run"]
        known = (run_directory / "wandb_id").read_text().strip()
        assert {run.run_id for run in runs} == {known}
        assert {(r.project, r.entity, r.run_group, r.display_name, tuple(r.tags)) for r in runs} == {
            ("p", "team", "g", "mlp-digits", ("a", "b"))
        }
        config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
        assert config["training"]["batch_size"] == 64
        assert config["facts"]["host"] == "node-1"
        exits = [r.exit.exit_code for r in records(run_directory) if r.WhichOneof("record_type") == "exit"]
        assert exits == [1, 0]
        assert wandb.run is None

    def test_a_checkpoint_is_uploaded_only_when_asked(self, run_directory: Path) -> None:
        folder = run_directory / "checkpoints" / "step-4"
        folder.mkdir(parents=True)
        (folder / "weights.bin").write_bytes(b"w")
        tracker = self.make(upload_checkpoints=True)
        tracker.start(run_info(run_directory))
        tracker.checkpoint(folder, 4, {"val_loss": 0.5})
        tracker.finish("completed", {})
        kinds = {record.WhichOneof("record_type"): record for record in records(run_directory)}
        artifact = kinds["artifact"].artifact if "artifact" in kinds else kinds["request"].request.log_artifact.artifact
        assert artifact.type == "model"
        assert set(artifact.aliases) == {"latest", "step-4"}
        assert [entry.path for entry in artifact.manifest.contents] == ["weights.bin"]

    def test_a_run_that_is_open_already_is_used_and_left_open(self, run_directory: Path) -> None:
        own = wandb.init(mode="offline", dir=str(run_directory), settings=wandb.Settings(silent=True))
        try:
            tracker = self.make()
            tracker.start(run_info(run_directory))
            tracker.log({"train_loss": 1.0}, step=1)
            tracker.finish("completed", {})
            assert wandb.run is own
        finally:
            own.finish()
            wandb.teardown()

    def test_a_missing_key_is_an_error_and_leaves_no_service(self, run_directory: Path) -> None:
        with pytest.raises(wandb.errors.UsageError, match="API key"):
            WandbTracker(TrackingConfig(mode="online")).start(run_info(run_directory))

    def test_online_leaves_the_mode_to_the_environment(
        self, run_directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setenv("WANDB_MODE", "disabled")
            tracker = WandbTracker(TrackingConfig(mode="online"))
            tracker.start(run_info(run_directory))
            tracker.log({"train_loss": 1.0}, step=1)
            tracker.finish("completed", {})
        assert not list(run_directory.glob("wandb/*"))

    def test_finish_without_start_is_harmless(self) -> None:
        self.make().finish("failed", {})


def test_a_missing_key_is_not_asked_for_on_a_terminal(tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from distributed_training.tracking import RunInfo
from distributed_training.tracking.wandb import WandbTracker
WandbTracker().start(RunInfo(name="r", directory=Path({str(tmp_path)!r}), config={{}}))
"""
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = b""
    try:
        try:
            while chunk := os.read(ours, 4096):
                output += chunk
        except OSError:  # how a terminal ends on Linux
            pass
        assert child.wait(timeout=60) == 1
    finally:
        child.kill()
        os.close(ours)
    assert b"No API key configured" in output
    assert b"choice" not in output
