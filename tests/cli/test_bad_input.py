"""A user's mistake ends with one clear line that names the culprit, an exit code, and no traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

MODULE = """
import torch
from torch import nn

class Tuple(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
    def forward(self, x):
        return self.layer(x.flatten(1)), 3

class Nan(Tuple):
    def forward(self, x):
        return self.layer(x.flatten(1)) * float("nan")

def raises(sample):
    if int(sample[1]) == 3:
        raise ValueError("cannot handle a three")
    return sample

def hangs(sample):
    import time
    if torch.utils.data.get_worker_info():
        time.sleep(60)
    return sample
"""

CASES = {
    "missing file": (["train", "nope.yaml"], 2, "nope.yaml: no such file"),
    "unknown key": (["train", "trainin.lr=3"], 2, "unknown setting trainin.lr; did you mean training.lr?"),
    "unknown key in file": (["train", "typo.yaml"], 2, "typo.yaml: unknown setting training.epoch; did you mean"),
    "wrong type": (["train", "training.epochs=two"], 2, "training.epochs='two' must be a whole number"),
    "impossible value": (["train", "training.lr=-1"], 2, "training.lr=-1.0 must be greater than 0"),
    "forgotten value": (["train", "training.lr"], 2, "training.lr needs a value"),
    "not key=value": (["train", "a.yaml", "b.yaml"], 2, ""),
    "unknown model": (["train", "model=resnet19"], 2, "did you mean resnet18?"),
    "unknown strategy": (["train", "strategy=singel"], 2, "strategy='singel' is unknown"),
    "unknown tracker": (["train", "tracking.trackers=[tensorbord]"], 2, "did you mean tensorboard?"),
    "unknown dataset": (["train", "data.dataset=imagez"], 2, "did you mean images?"),
    "no gpu": (["train", "training.device=cuda"], 2, "sees no GPU"),
    "tf32 on cpu": (["train", "training.precision=tf32"], 2, "needs an NVIDIA GPU"),
    "batch too large": (["train", "training.batch_size=5000"], 3, "larger than the dataset of 1438 samples"),
    "empty dataset": (["train", "data.dataset=csv", "data.root=empty.csv"], 3, "empty.csv: holds no rows"),
    "ragged row": (["train", "data.dataset=csv", "data.root=ragged.csv"], 3, "ragged.csv, line 3: 2 cells"),
    "missing column": (["train", "data.dataset=csv", "data.root=good.csv", "data.args.label=z"], 3, "no column 'z'"),
    "labels out of range": (
        ["train", "data.dataset=csv", "data.root=good.csv", "model.num_classes=2"],
        3,
        "labels 2 to 7 do not fit",
    ),
    "missing data": (["train", "data.dataset=cifar10", "data.root=here", "data.args.url=http://127.0.0.1:9/x"], 3, ""),
    "truncated image": (["train", "data.dataset=images", "data.root=pictures", "training.batch_size=2"], 3, "1.png"),
    "none of the three forms": (["train", "model.target=mine:Tuple"], 3, "Tuple returned a tuple; it must return"),
    "missing class": (["train", "model.target=mine:Nope"], 2, "mine has no Nope"),
    "missing module": (["train", "model.target=nothere:Nope"], 2, "no module named nothere"),
    "diverging": (["train", "model.target=mine:Nan"], 5, "not finite in 5 steps in a row (epoch 0, step 4)"),
    "user function raises": (["train", "data.preprocess=mine:raises"], 3, "ValueError: cannot handle a three"),
    "user function raises in a worker": (
        ["train", "data.preprocess=mine:raises", "data.num_workers=2"],
        3,
        "in a loader process",
    ),
    "user function hangs in a worker": (
        ["train", "data.preprocess=mine:hangs", "data.num_workers=1", "run.deadline=1"],
        3,
        "no batch from the loader processes within 1 s",
    ),
    "unwritable run directory": (["train", "run.root=good.csv/runs"], 4, "cannot be written"),
    "nothing to resume": (["train", "--resume", "runs/nothere"], 4, "runs/nothere: no such run or checkpoint"),
    "not a run": (["validate", "."], 4, "not a run directory"),
    "no events": (["report", "."], 4, "no events to report"),
}


@pytest.fixture
def files(in_tmp: Path) -> Path:
    Path("mine.py").write_text(MODULE)
    Path("typo.yaml").write_text("training:\n  epoch: 3\n")
    Path("a.yaml").write_text("")
    Path("b.yaml").write_text("")
    Path("empty.csv").write_text("a,b,label\n")
    Path("ragged.csv").write_text("a,b,label\n1,2,0\n3,4\n")
    Path("good.csv").write_text("a,b,label\n" + "".join(f"{i},{i},{i % 8}\n" for i in range(80)))
    for name in ("cat", "dog"):
        folder = Path("pictures") / name
        folder.mkdir(parents=True)
        for number in range(4):
            _png(folder / f"{number}.png")
    damaged = Path("pictures/cat/1.png")
    damaged.write_bytes(damaged.read_bytes()[:200])
    return in_tmp


def _png(path: Path) -> None:
    import numpy as np
    from PIL import Image

    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(path)


@pytest.mark.parametrize("case", CASES)
def test_one_clear_error(dtrain: Callable, files: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "mine", raising=False)
    words, code, text = CASES[case]
    outcome = dtrain(*words, *(["run.name=bad"] if words[0] == "train" else []))
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, outcome.err
    assert text in errors[0]
    assert outcome.code == code
    assert "Traceback" not in outcome.err + outcome.out
    sys.modules.pop("mine", None)


def test_a_failed_run_is_recorded_as_failed(dtrain: Callable, files: Path) -> None:
    from distributed_training.runtime.run_directory import RunDirectory

    dtrain("train", "model.target=mine:Nan", "run.name=bad")
    assert list(RunDirectory(Path("runs/bad")).events())[-1]["status"] == "failed"
    import sys

    sys.modules.pop("mine", None)
