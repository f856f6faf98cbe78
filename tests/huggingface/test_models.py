"""Models of transformers by task: labels, adapters, what cannot be had, and what is written of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.huggingface.cases import NO_DROPOUT, make_data, make_model, settings, train

from distributed_training import Trainer
from distributed_training.config import ModelConfig
from distributed_training.huggingface import load_model, load_tokenizer, save
from distributed_training.models import build_model
from distributed_training.runtime.errors import CheckpointError, ConfigError, MissingDependencyError, ModelError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
TASKS = ["sequence_classification", "token_classification", "causal_lm"]


def logits(model: Any, task: str) -> torch.Tensor:
    """What it says about some texts."""
    batch = make_data(task, 500).fetch(np.arange(4))
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**batch).logits
    return found


def test_labels_of_the_data_are_those_of_the_model(tiny: Path) -> None:
    folder = str(tiny / "sequence-classification")
    same = load_model(folder, "sequence-classification", labels=["cooking", "space", "sport"])
    other: Any = load_model(folder, "sequence_classification", labels=["bad", "good"], dtype="bfloat16")

    assert same.config.label2id == {"cooking": 0, "space": 1, "sport": 2}
    assert (other.config.num_labels, other.config.id2label) == (2, {0: "bad", 1: "good"})
    assert other.classifier.weight.shape[0] == 2
    assert other.dtype == torch.bfloat16
    assert other.training


def test_an_image_classifier_takes_images(tiny: Path) -> None:
    model: Any = load_model(
        str(tiny / "image-classification"), "image_classification", labels=4, lora={"targets": ["q_proj", "v_proj"]}
    )
    size = model.config.image_size
    out = model(pixel_values=torch.zeros(2, model.config.num_channels, size, size), labels=torch.tensor([0, 3]))

    assert out.logits.shape == (2, 4)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any("classifier" in name for name in trained)
    assert all("lora_" in name or "classifier" in name for name in trained)


@pytest.mark.parametrize("task", TASKS)
def test_a_saved_model_says_the_same_in_plain_transformers(task: str, tiny: Path, tmp_path: Path) -> None:
    model = make_model(tiny, task)
    tokenizer = load_tokenizer(str(tiny / task.replace("_", "-")))
    save(model, tmp_path / "whole", tokenizer=tokenizer)
    auto = getattr(transformers, {"causal_lm": "AutoModelForCausalLM"}.get(task, "") or _auto(task))

    loaded = auto.from_pretrained(tmp_path / "whole")
    assert torch.equal(logits(loaded, task), logits(model, task))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "whole")("a b").input_ids == tokenizer("a b").input_ids
    assert (tmp_path / "whole" / "model.safetensors").is_file()
    assert (tmp_path / "whole" / "generation_config.json").is_file() == (task == "causal_lm")


def _auto(task: str) -> str:
    return "AutoModelFor" + "".join(part.capitalize() for part in task.split("_"))


def test_adapters_are_saved_by_themselves_or_merged(tiny: Path, tmp_path: Path) -> None:
    task = "sequence_classification"
    model = make_model(tiny, task, lora={"rank": 4, "alpha": 8})
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
    expected = logits(model, task)
    save(model, tmp_path / "adapters")
    save(model, tmp_path / "merged", merge=True)

    assert not (tmp_path / "adapters" / "model.safetensors").exists()
    assert torch.equal(logits(model, task), expected)  # nothing was done to the model itself
    config = {"overrides": NO_DROPOUT[task]}
    base = load_model(str(tiny / "sequence-classification"), task, labels=3, **config)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    assert torch.allclose(logits(again, task), expected, atol=1e-6)
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged, task), expected, atol=1e-5)


def test_a_resume_in_the_middle_of_an_epoch_is_exact_with_adapters(tiny: Path, in_tmp: Path) -> None:
    case: dict[str, Any] = {"task": "causal_lm", "model": {"lora": {"rank": 4, "dropout": 0.2}}}
    whole = train({**case, "settings": {}, "run_dir": "whole"}, tiny)
    first = train({**case, "settings": {"run__stop_after_steps": 4}, "run_dir": "broken"}, tiny)
    rest = train({**case, "settings": {}, "run_dir": "broken", "resume": "auto"}, tiny)

    assert first["losses"] + rest["losses"] == whole["losses"]
    assert rest["val_loss"] == whole["val_loss"]

    other: Any = make_model(tiny, "causal_lm", lora={"rank": 4})
    with torch.no_grad():
        other.get_base_model().model.embed_tokens.weight.mul_(1.1)
    from distributed_training.models.adapters import fingerprint

    frozen = {n: p for n, p in other.named_parameters() if n in other.weights_elsewhere}
    other.base_fingerprint = fingerprint(frozen)
    trainer = Trainer(other, config=settings(), run_dir=False)
    with pytest.raises(CheckpointError, match="frozen weights that its adapters were trained on"):
        trainer.load("broken")
    trainer.close()


def test_gradient_checkpointing_by_the_models_own_switch_changes_nothing(tiny: Path) -> None:
    case = {"task": "causal_lm", "model": {"lora": {"rank": 4}}}
    plain = train({**case, "settings": {"training__epochs": 1}}, tiny)
    saving = train({**case, "settings": {"training__epochs": 1, "training__gradient_checkpointing": True}}, tiny)

    assert saving["losses"] == pytest.approx(plain["losses"], abs=1e-6)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ({"checkpoint": "x"}, ConfigError, r"needs model\.args\.task: one of sequence_classification"),
        ({"task": "causal_lm"}, ConfigError, r"needs model\.args\.checkpoint"),
        ({"task": "causal", "checkpoint": "x"}, ConfigError, "did you mean causal_lm"),
        ({"task": "causal_lm", "checkpoint": "./nothing"}, ModelError, r"\./nothing is no folder"),
        ({"task": "causal_lm", "checkpoint": "x/y"}, ModelError, "x/y: .*(HF_HUB_OFFLINE|cannot be reached)"),
        ({"task": "causal_lm", "checkpoint": "TINY", "overrides": {"dropot": 0}}, ConfigError, "has no such setting"),
        (
            {"task": "causal_lm", "checkpoint": "TINY", "lora": {"rnak": 4}},
            ConfigError,
            r"lora\.rnak; did you mean rank",
        ),
        (
            {"task": "causal_lm", "checkpoint": "TINY", "lora": {"rank": 0}},
            ConfigError,
            r"lora\.rank=0 must be greater",
        ),
        (
            {"task": "causal_lm", "checkpoint": "TINY", "lora": {"targets": ["nix"]}},
            ModelError,
            "all-linear, or to some",
        ),
        ({"task": "causal_lm", "checkpoint": "TINY", "quantization": "int4"}, ConfigError, "nothing is left to train"),
        ({"task": "causal_lm", "checkpoint": "TINY", "attention": "magic"}, ModelError, "TINY: .*magic"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    args: dict[str, Any],
    error: type[Exception],
    message: str,
    tiny: Path,
    in_tmp: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (in_tmp / "TINY").symlink_to(tiny / "causal-lm")
    with pytest.raises(error, match=message) as caught:
        build_model(ModelConfig(name="huggingface", args=args))
    assert "\n" not in str(caught.value)


def test_fewer_labels_than_the_data_has_are_refused(tiny: Path) -> None:
    args = {"task": "sequence_classification", "checkpoint": str(tiny / "sequence-classification")}
    with pytest.raises(ModelError, match=r"model\.num_classes=2 but the dataset has 3 classes"):
        build_model(ModelConfig(name="huggingface", num_classes=2, args=args), num_classes=3)


def test_quantised_loading_needs_its_library(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'distributed-training\[quantization\]'"):
        load_model(str(tiny / "causal-lm"), "causal_lm", quantization="int8", lora={"rank": 4})
