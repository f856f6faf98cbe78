"""A checkpoint is whole or not there, whatever happens while it is written and afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed_training.checkpoint import files
from distributed_training.checkpoint.files import checkpoint_name, read_info, read_state, verify, write_checkpoint
from distributed_training.checkpoint.staging import Staging
from distributed_training.checkpoint.store import CheckpointStore
from distributed_training.checkpoint.tree import take_apart
from distributed_training.config import CheckpointConfig
from distributed_training.runtime.errors import CheckpointError


def write(folder: Path, state: Any, *, step: int = 1, metrics: dict[str, float] | None = None) -> Path:
    """One checkpoint in `folder`."""
    description, tensors = take_apart(state)
    staging = Staging()
    staging.copy(tensors)
    return write_checkpoint(folder, staging, description, step=step, epoch=step // 2, metrics=metrics or {}).path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path, {"w": torch.arange(8.0), "n": 3}, step=4, metrics={"val_loss": 0.5})


def test_what_was_written_is_read(checkpoint: Path, tmp_path: Path) -> None:
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(4)]
    info = read_info(checkpoint)
    assert (info.path, info.step, info.epoch, info.metrics) == (checkpoint, 4, 2, {"val_loss": 0.5})
    state = read_state(checkpoint)
    assert state["n"] == 3
    assert torch.equal(state["w"], torch.arange(8.0))


def test_names_sort_by_step() -> None:
    names = [checkpoint_name(step) for step in (0, 9, 10, 99_999, 10**9)]
    assert names == sorted(names)


def test_metrics_that_are_not_finite_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path, {}, metrics={"a": float("inf"), "b": 0.1 + 0.2})
    assert read_info(path).metrics == {"a": float("inf"), "b": 0.1 + 0.2}


def test_metrics_may_be_numbers_of_numpy_and_torch(tmp_path: Path) -> None:
    import numpy as np

    path = write(tmp_path, {}, metrics={"a": np.float32(0.5), "b": torch.tensor(0.25)})  # type: ignore[dict-item]
    assert read_info(path).metrics == {"a": 0.5, "b": 0.25}


def test_every_truncation_of_either_file_is_detected(checkpoint: Path) -> None:
    for name in (files.STATE_FILE, files.MANIFEST_FILE):
        whole = (checkpoint / name).read_bytes()
        for size in range(len(whole)):
            (checkpoint / name).write_bytes(whole[:size])
            with pytest.raises(CheckpointError, match=r"damaged"):
                verify(checkpoint)
        (checkpoint / name).write_bytes(whole)
        verify(checkpoint)


def test_every_flipped_byte_in_either_file_is_detected(checkpoint: Path) -> None:
    for name in (files.STATE_FILE, files.MANIFEST_FILE):
        whole = bytearray((checkpoint / name).read_bytes())
        for place in range(len(whole)):
            whole[place] ^= 0xFF
            (checkpoint / name).write_bytes(whole)
            with pytest.raises(CheckpointError):
                read_state(checkpoint)
            whole[place] ^= 0xFF
        (checkpoint / name).write_bytes(whole)
        verify(checkpoint)


def test_a_single_flipped_bit_in_the_manifest_never_changes_what_is_read(checkpoint: Path) -> None:
    """JSON can be spelt in two ways (1e5, 1E5); such a flip may pass, but only with the same meaning."""
    file = checkpoint / files.MANIFEST_FILE
    whole = bytearray(file.read_bytes())
    before = files._read_manifest(checkpoint)
    for place in range(len(whole)):
        bit = 1 << (place % 8)
        whole[place] ^= bit
        file.write_bytes(whole)
        with contextlib.suppress(CheckpointError):
            assert files._read_manifest(checkpoint) == before
        whole[place] ^= bit


def test_added_bytes_are_detected(checkpoint: Path) -> None:
    with (checkpoint / files.STATE_FILE).open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match=r"state\.safetensors: damaged: \d+ bytes instead of \d+"):
        verify(checkpoint)


@pytest.mark.parametrize("name", [files.STATE_FILE, files.MANIFEST_FILE])
def test_a_missing_file_is_named(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        read_state(checkpoint)


def test_a_missing_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        read_info(tmp_path / "step-0000000009")


def reseal(checkpoint: Path, **changes: Any) -> None:
    """Change a manifest and give it a valid hash again."""
    manifest = files._read_manifest(checkpoint) | changes
    (checkpoint / files.MANIFEST_FILE).write_bytes(files._seal(manifest))


def test_another_format_is_refused_with_both_numbers(checkpoint: Path) -> None:
    reseal(checkpoint, format=99)
    with pytest.raises(CheckpointError, match="format 99, this version reads format 1"):
        read_state(checkpoint)


@pytest.mark.parametrize("manifest", [{}, [], 3, {"format": 1}])
def test_a_manifest_that_is_none_is_refused(checkpoint: Path, manifest: Any) -> None:
    (checkpoint / files.MANIFEST_FILE).write_bytes(files._seal(manifest))
    with pytest.raises(CheckpointError):
        read_state(checkpoint)


def test_a_tensor_that_the_file_lacks_is_reported(checkpoint: Path) -> None:
    reseal(checkpoint, state={"w": {"$tensor": "elsewhere"}})
    with pytest.raises(CheckpointError, match=r"damaged.*elsewhere"):
        read_state(checkpoint)


def test_a_file_outside_the_checkpoint_is_never_read(checkpoint: Path, tmp_path: Path) -> None:
    """What decides is the fixed name of the state file; a manifest cannot point elsewhere."""
    manifest = files._read_manifest(checkpoint)
    reseal(checkpoint, files={"../../etc/passwd": manifest["files"][files.STATE_FILE]})
    with pytest.raises(CheckpointError):
        read_state(checkpoint)


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, {"w": torch.zeros(3)}, step=2)
    path = write(tmp_path, {"w": torch.ones(3)}, step=2)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert torch.equal(read_state(path)["w"], torch.ones(3))


def test_leftovers_of_a_killed_process_with_our_number_do_not_matter(tmp_path: Path) -> None:
    """In a container every start has the same process number."""
    write(tmp_path, {"w": torch.zeros(3)}, step=2)
    for prefix in (files.UNFINISHED, files.REPLACED):
        stale = tmp_path / f"{prefix}{checkpoint_name(2)}-{os.getpid()}"
        stale.mkdir()
        (stale / files.STATE_FILE).write_bytes(b"half")
    path = write(tmp_path, {"w": torch.ones(3)}, step=2)
    assert torch.equal(read_state(path)["w"], torch.ones(3))


def test_a_failure_of_any_kind_leaves_nothing_behind(tmp_path: Path) -> None:
    write(tmp_path, {"w": torch.zeros(3)}, step=1)
    staging = Staging()
    staging.copy({})
    with pytest.raises(TypeError):
        write_checkpoint(tmp_path, staging, {"cannot be JSON": object()}, step=2, epoch=0, metrics={})
    assert [p.name for p in tmp_path.iterdir()] == [checkpoint_name(1)]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/step-0000000001: not saved"):
        write(tmp_path / "file", {})


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from distributed_training.checkpoint.store import CheckpointStore
from distributed_training.config import CheckpointConfig
from distributed_training.runtime.errors import CheckpointError

folder = Path(sys.argv[1])
store = CheckpointStore(folder, CheckpointConfig(background=sys.argv[2] == "background"))
store.save({"w": torch.ones(1000)}, step=1, epoch=0, metrics={})
store.wait()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    store.save({"w": torch.ones(1_000_000)}, step=2, epoch=0, metrics={})
    store.wait()
except CheckpointError as error:
    sys.stdout.write(str(error))
"""


@pytest.mark.parametrize("how", ["background", "at once"])
def test_a_full_disk_is_an_error_that_leaves_earlier_ones_intact(tmp_path: Path, how: str) -> None:
    """A limit on the size of files stands for the full disk: the write fails in the middle the same way."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), how], capture_output=True, text=True, timeout=60, check=True
    )
    assert f"{tmp_path}/{checkpoint_name(2)}: not saved (File too large)" in done.stdout
    assert "earlier checkpoints are intact" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint_name(1)]
    verify(tmp_path / checkpoint_name(1))


SAVE_FOREVER = """
import itertools, os, sys
from pathlib import Path
import torch
from distributed_training.checkpoint.store import CheckpointStore
from distributed_training.config import CheckpointConfig

store = CheckpointStore(Path(sys.argv[1]), CheckpointConfig(keep=2, monitor="none"))
found = store.newest_good()
first = found.step + 1 if found else 1
for step in itertools.count(first):
    state = {"step": step, "a": torch.full((50_000,), float(step)), "b": [torch.full((7,), step)]}
    store.save(state, step=step, epoch=0, metrics={})
    if step == first + 1:
        os.write(1, b"x")
"""


def test_kill_9_at_any_moment_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(0)
    before = 0
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            assert process.stdout.read(1) == b"x"
        time.sleep(chance.uniform(0, 0.06))
        process.send_signal(signal.SIGKILL)
        assert process.wait(10) == -signal.SIGKILL
        store = CheckpointStore(tmp_path, CheckpointConfig())
        info = store.newest_good()
        assert info is not None
        assert info.step > before, "what was committed before is there or newer"
        before = info.step
        state = store.load(info)
        assert state["step"] == info.step
        assert torch.equal(state["a"], torch.full((50_000,), float(info.step)))
        assert torch.equal(state["b"][0], torch.full((7,), info.step))
        for committed in store.all():
            verify(committed.path)


def test_a_pickle_in_place_of_the_state_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """Even with a valid hash nothing is ever unpickled."""
    import hashlib
    import pickle

    class Evil:
        def __reduce__(self) -> Any:
            return (Path(tmp_path / "run").touch, ())

    pickled = pickle.dumps({"w": Evil()})
    for name, data in {"pickle": pickled, "torch": None}.items():
        file = checkpoint / files.STATE_FILE
        if data is None:
            torch.save({"w": torch.ones(2)}, file)
        else:
            file.write_bytes(data)
        content = file.read_bytes()
        reseal(checkpoint, files={file.name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}})
        verify(checkpoint)
        with pytest.raises(CheckpointError, match="damaged"):
            read_state(checkpoint)
        assert not (tmp_path / "run").exists(), name


def test_manifests_are_plain_json(checkpoint: Path) -> None:
    sealed = json.loads((checkpoint / files.MANIFEST_FILE).read_text())
    assert sealed["manifest"]["step"] == 4
    shutil.rmtree(checkpoint)
