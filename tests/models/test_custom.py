"""Users' own models by import path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from distributed_training.config import ModelConfig
from distributed_training.models import build_model
from distributed_training.runtime.errors import ConfigError, ModelError

SOURCE = """
from torch import nn

class Takes(nn.Linear):
    def __init__(self, num_classes=2, width=3):
        super().__init__(width, num_classes)

class TakesNot(nn.Linear):
    def __init__(self, width=3):
        super().__init__(width, 1)

def not_a_model():
    return 5

ready = TakesNot()
number = 5
"""


@pytest.fixture(autouse=True)
def _my_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_models_for_test.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("my_models_for_test", None)


def _build(name: str, dataset_classes: int | None = None, **settings: object) -> nn.Module:
    config = ModelConfig(target=f"my_models_for_test:{name}", **settings)
    return build_model(config, num_classes=dataset_classes, input_shape=None)


def test_gets_args_and_num_classes_where_it_takes_them() -> None:
    assert _build("Takes", 7, args={"width": 4}).weight.shape == (7, 4)
    assert _build("Takes", 7, num_classes=8).weight.shape == (8, 3)
    assert _build("Takes", 7, args={"num_classes": 9}).weight.shape == (9, 3)
    assert _build("Takes").weight.shape == (2, 3)
    assert _build("TakesNot", 7).weight.shape == (1, 3)


def test_target_from_a_library() -> None:
    model = build_model(ModelConfig(target="torch.nn:Linear", args={"in_features": 2, "out_features": 3}))
    assert isinstance(model, nn.Linear)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            "Takes",
            {"wdth": 3},
            r"my_models_for_test:Takes does not take model\.args=.*unexpected keyword argument 'wdth'",
        ),
        ("Takes", {"width": "x"}, r"my_models_for_test:Takes does not take model\.args="),
        ("not_a_model", {}, r"my_models_for_test:not_a_model made a int, not a torch\.nn\.Module"),
        ("ready", {}, r"my_models_for_test:ready: must be a class or function"),
        ("number", {}, r"my_models_for_test:number: must be a class or function"),
    ],
)
def test_wrong_target(name: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        _build(name, args=args)


def test_missing_target() -> None:
    with pytest.raises(ConfigError, match=r"^model\.target='my_models_for_test:Nope'"):
        _build("Nope")


def test_too_few_classes_for_the_dataset() -> None:
    with pytest.raises(ModelError, match="labels 3 to 9 do not fit"):
        _build("Takes", 10, num_classes=3)


def test_pretrained_loads_weights(tmp_path: Path) -> None:
    weights = tmp_path / "w.pth"
    state = nn.Linear(3, 2).state_dict()
    torch.save(state, weights)
    model = _build("Takes", pretrained=True, weights=str(weights))
    assert torch.equal(model.weight, state["weight"])
    with pytest.raises(ConfigError, match=r"needs a file in model\.weights.*my_models_for_test:Takes"):
        _build("Takes", pretrained=True)
