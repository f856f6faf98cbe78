"""The blocks of the pages on Hugging Face and the example of it, with a tiny model and a stand-in for the Hub."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.huggingface.hub_stand_in import HubStandIn
from tests.pages import ROOT, Block, run_by


def run(block: Block, changed: dict[str, str], names: dict[str, Any]) -> None:
    """Run a block with other sizes; what it defines is in `names` then."""
    text = block.text
    for old, new in changed.items():
        assert old in text, f"{old} is not in the block any more:\n{text}"
        text = text.replace(old, new)
    exec(compile("\n" * (block.line - 1) + text, str(block.page), "exec"), names)


def block_of(page: str, *, holding: str) -> Block:
    (found,) = [block for block in run_by(__file__, page) if holding in block.text]
    return found


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTRAIN_TRAINING__DEVICE", "cpu")


def test_the_walk_and_the_other_trainer(place: Path, hub: HubStandIn) -> None:
    from distributed_training import AcceleratedTrainer

    names: dict[str, Any] = {"AcceleratedTrainer": AcceleratedTrainer}
    run(block_of("huggingface.md", holding="load_tokenizer"), {"epochs=8": "epochs=1"}, names)
    names["trainer"].close()
    assert "model.safetensors" in hub.files["me/topics"]
    assert hub.repos["me/topics"]["visibility"] == "private"

    few = {"epochs=3": "epochs=1, run_dir=False", '"wandb"': "None"}  # W&B needs an account
    run(block_of("huggingface.md", holding="AcceleratedTrainer"), few, names)
    with names["trainer"] as trainer:
        assert trainer.train().status == "completed"


def test_text_is_made_ready(place: Path) -> None:
    names: dict[str, Any] = {}
    run(block_of("text-data.md", holding="load_data"), {}, names)

    assert names["ready"]["train"].classes == ["cooking", "space", "sport"]
    assert {"input_ids", "attention_mask", "labels"} <= names["ready"]["train"][0].keys()


def test_the_example_trains_saves_and_pushes(
    place: Path, hub: HubStandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = str(ROOT / "examples" / "text_classification.py")
    monkeypatch.setattr(sys, "argv", [program, "--epochs=1", "--lora", "--push=me/example"])
    runpy.run_path(program, run_name="__main__")

    assert "completed after " in capsys.readouterr().out
    assert Path("my-model/model.safetensors").is_file()
    assert "model.safetensors" in hub.files["me/example"]
