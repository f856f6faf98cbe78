"""The commands on the pages that one process can do in seconds are done, with one epoch and little data.

A folder is made as the pages suppose it: data files, modules of the user's own, a run. Commands of the same page follow
each other there. What they write about themselves is not looked at here, only that they succeed or fail as shown.
"""

from __future__ import annotations

import csv
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.sources.test_cifar import archive, files10, files100
from tests.docs.test_commands import WRONG
from tests.pages import Command, blocks, dtrain_commands

from distributed_training import get_model
from distributed_training.config import ModelConfig

QUICK = ("training.epochs=1", "training.batch_size=64", "run.progress=off", "training.device=cpu")
IN_ONE_PROCESS = {"train", "config", "report", "audit", "validate", "predict", "version", "native"}
NOT_HERE = {
    "configs/text.yaml": "tests/huggingface/test_walk.py does",
    "--split": "starts a process of its own: tests/split does",
    "tracking.trackers=[wandb]": "needs an account, or seconds to write for one: tests/tracking does",
    "build": "compiles for minutes: make tests does",
    "runs/digits": "is of a search: tests/tuning does",
    "runs/topics": "is of text: tests/huggingface/test_walk.py does",
    "--to": "needs a GPU side: tests/split/test_pages.py does",
    "strategy=": "needs ranks: tests/strategies does",
    "--nproc": "needs ranks: tests/launch does",
}
"""Words of commands that are left to others."""


def page_commands() -> dict[str, list[Command]]:
    """The commands that are run here, by page."""
    found: dict[str, list[Command]] = {}
    for command in dtrain_commands():
        words = " ".join(command.words)
        alone = "dtrain" in command.block.text and "launch" not in command.block.text
        if command.words[0] in IN_ONE_PROCESS and alone and not any(word in words for word in NOT_HERE):
            found.setdefault(command.block.page.name, []).append(command)
    return found


@pytest.fixture
def place(in_tmp: Path) -> Path:
    """What the pages take for granted."""
    for block in blocks("python"):
        first = block.text.partition("\n")[0]
        if first.startswith("# my_") and first.endswith(".py"):
            Path(first.removeprefix("# ")).write_text(block.text)
    chance = np.random.default_rng(0)
    with Path("flowers.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["width", "height", "species"])
        lines.writerows([f"{x:.3f}", f"{y:.3f}", ["rose", "lily"][int(x > 0)]] for x, y in chance.normal(size=(80, 2)))
    np.savez("arrays.npz", inputs=chance.normal(size=(80, 4)).astype("float32"), targets=np.arange(80) % 3)
    _table(chance)
    _pictures(chance)
    Path("datasets").mkdir()
    Path("datasets/cifar-10-binary.tar.gz").write_bytes(archive(files10()))
    Path("datasets/cifar-100-binary.tar.gz").write_bytes(archive(files100(), "cifar-100-binary"))
    trained = get_model("resnet18")(ModelConfig(name="resnet18", num_classes=1000), (3, 224, 224))
    torch.save(trained.state_dict(), "resnet18.pth")
    return in_tmp


def _table(chance: np.random.Generator) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {"width": chance.normal(size=80), "height": chance.normal(size=80), "kind": np.arange(80) % 2}
    pyarrow.parquet.write_table(pyarrow.table(columns), "table.parquet")


def _pictures(chance: np.random.Generator) -> None:
    from PIL import Image

    for kind in ("cat", "dog"):
        Path("pets", kind).mkdir(parents=True)
        for number in range(6):
            Image.fromarray(chance.integers(0, 255, (70, 80, 3), dtype=np.uint8)).save(f"pets/{kind}/{number}.png")


@pytest.mark.parametrize("page", page_commands())
def test_commands_do_what_they_say(page: str, place: Path, dtrain: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in page_commands()[page]:
        words, wrong = list(command.words), bool(WRONG & {*command.words, *command.variables})
        named = {word for word in words if word.startswith("runs/")}
        if named and not Path("runs/NAME").exists():
            assert dtrain("train", *QUICK, "run.name=NAME").code == 0
            shutil.copytree("runs/NAME", "runs/mine", dirs_exist_ok=True)
        if words[0] == "train":
            words += () if wrong else QUICK
            if any(word.startswith("data.root=") for word in words):
                words.append("training.batch_size=8")  # there are few samples
        with monkeypatch.context() as patch:
            if words[0] == "train":
                patch.setitem(sys.modules, "matplotlib", None)  # to draw each report would take seconds
            for variable in command.variables:
                patch.setenv(*variable.split("=", 1))
            outcome = dtrain(*words)
        assert outcome.code == (2 if wrong else 0), f"{command}\n{outcome.err[-2000:]}"


def test_most_commands_of_one_process_are_run() -> None:
    assert sum(map(len, page_commands().values())) >= 25
    assert {"README.md", "checkpoints.md", "configuration.md", "data.md", "models.md"} <= page_commands().keys()
