"""Two ranks train models of transformers as one process does: losses, adapters, what is saved from divided weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.forked_ranks import RankServer
from tests.huggingface.cases import make_data, train

from distributed_training.checkpoint import read_state

transformers = pytest.importorskip("transformers")

LORA = {"model": {"lora": {"rank": 4}}}
BASIC = {"training__type": "basic"}
CASES: dict[str, dict[str, Any]] = {
    "accelerated": {"task": "sequence_classification", "settings": {"training__type": "accelerated"}},
    "zero2": {
        "task": "sequence_classification",
        "settings": {"training__type": "accelerated", "strategy__zero_stage": 2},
    },
    "zero3": {
        "task": "sequence_classification",
        "settings": {"training__type": "accelerated", "strategy__zero_stage": 3},
        "save": "from-zero3",
    },
    "fsdp": {"task": "causal_lm", "settings": {"strategy__name": "zero3"}, "save": "from-fsdp"},
    # Ranks have different numbers of tokens, in parts of different numbers too.
    "tokens": {
        "task": "causal_lm",
        "settings": {"strategy__name": "ddp", "training__gradient_accumulation": 2},
    },
    "names": {"task": "token_classification", "settings": {"strategy__name": "zero1"}},
    "lora-ddp": {"task": "causal_lm", **LORA, "settings": {"strategy__name": "ddp"}},
    "lora-zero3": {
        "task": "sequence_classification",
        **LORA,
        "settings": {"training__type": "accelerated", "strategy__zero_stage": 3},
        "save": "merged",
        "merge": True,
        "run_dir": "lora-run",
    },
    "lora-fsdp": {"task": "sequence_classification", **LORA, "settings": {"strategy__name": "fsdp"}},
}


@pytest.fixture(scope="module")
def found(rank_server: RankServer, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What two ranks made of all cases, and where they ran."""
    folder = tmp_path_factory.mktemp("two-ranks")
    (folder / "cases.json").write_text(json.dumps(CASES))
    program = ["-m", "tests.huggingface.ranks.train_cases", "cases.json", str(tiny), "found.json"]
    rank_server.start(2, program, PWD=str(folder)).succeed()
    return json.loads((folder / "found.json").read_text()), folder


@pytest.fixture(scope="module")
def alone(tiny: Path) -> dict[str, Any]:
    """The same by BasicTrainer's strategy, one process."""
    expected = {}
    for name in ("accelerated", "tokens", "names", "lora-ddp", "lora-fsdp"):
        case = CASES[name]
        expected[name] = train({"task": case["task"], "model": case.get("model", {}), "settings": BASIC}, tiny)
    same = {"zero2": "accelerated", "zero3": "accelerated", "fsdp": "tokens", "lora-zero3": "lora-fsdp"}
    return expected | {name: expected[other] for name, other in same.items()}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process(name: str, found: Any, alone: dict[str, Any]) -> None:
    together = found[0][name]

    assert together["losses"] == pytest.approx(alone[name]["losses"], abs=1e-4)
    assert together["val_loss"] == pytest.approx(alone[name]["val_loss"], abs=1e-4)
    assert len(together["losses"]) == 6


@pytest.mark.parametrize(
    ("name", "saved", "auto"),
    [
        ("zero3", "from-zero3", "AutoModelForSequenceClassification"),
        ("fsdp", "from-fsdp", "AutoModelForCausalLM"),
        ("lora-zero3", "merged", "AutoModelForSequenceClassification"),
    ],
)
def test_what_divided_weights_are_saved_as_is_loaded_by_plain_transformers(
    name: str, saved: str, auto: str, found: Any
) -> None:
    answers, folder = found
    loaded, info = getattr(transformers, auto).from_pretrained(folder / saved, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    batch = make_data(CASES[name]["task"], loaded.config.vocab_size).fetch(np.arange(20))

    with torch.no_grad():
        loss = float(loaded.eval()(**batch).loss)
    assert loss == pytest.approx(answers[name]["val_loss"], abs=1e-4)
    assert "FSDP" not in (folder / saved / "config.json").read_text()


def test_a_checkpoint_of_adapters_holds_only_what_is_trained(found: Any, tiny: Path) -> None:
    """Saved by ZeRO-3 on two ranks, it goes on in one process."""
    run = found[1] / "lora-run"
    state = read_state(max((run / "checkpoints").glob("step-*")))
    assert state["model"]
    assert all("lora_" in name or "modules_to_save" in name for name in state["model"])

    case = {**CASES["lora-fsdp"], "run_dir": str(run), "resume": "auto"}
    case["settings"] = {**BASIC, "training__epochs": 3}
    assert train(case, tiny)["steps"] == 9
