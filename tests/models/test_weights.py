"""Trained weights: from files and from torchvision, and every way they can be wrong."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from distributed_training.config import ModelConfig
from distributed_training.models import build_model
from distributed_training.models.resnet import ResNet
from distributed_training.models.weights import read_weights
from distributed_training.runtime.errors import ConfigError, MissingDependencyError, ModelError


def _mlp(path: Path | None = None, hidden: int = 4, num_classes: int = 3) -> nn.Module:
    weights = None if path is None else str(path)
    config = ModelConfig(args={"hidden": [hidden]}, pretrained=path is not None, weights=weights)
    return build_model(config, num_classes=num_classes, input_shape=(2,))


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth", "w.pt"])
def test_formats(tmp_path: Path, name: str) -> None:
    state = _mlp().state_dict()
    (save_file if name.endswith("s") else torch.save)(state, tmp_path / name)
    assert _same(_mlp(tmp_path / name).state_dict(), state)


@pytest.mark.parametrize("wrapper", ["state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_wrappers_and_prefixes(tmp_path: Path, wrapper: str, prefix: str) -> None:
    state = _mlp().state_dict()
    torch.save({wrapper: {prefix + k: v for k, v in state.items()}, "epoch": 3}, tmp_path / "w.pth")
    assert _same(_mlp(tmp_path / "w.pth").state_dict(), state)


def test_weights_without_pretrained_are_not_read() -> None:
    build_model(ModelConfig(weights="nowhere.pth"), num_classes=2, input_shape=(2,))


def test_head_of_another_size_stays_fresh_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = _mlp(num_classes=5).state_dict()
    torch.save(state, tmp_path / "w.pth")
    torch.manual_seed(3)
    fresh = _mlp().state_dict()
    torch.manual_seed(3)
    with caplog.at_level(logging.WARNING):
        loaded = _mlp(tmp_path / "w.pth").state_dict()
    assert torch.equal(loaded["blocks.0.0.weight"], state["blocks.0.0.weight"])
    assert torch.equal(loaded["head.weight"], fresh["head.weight"])
    assert torch.equal(loaded["head.bias"], fresh["head.bias"])
    assert len(caplog.records) == 1
    assert "w.pth" in caplog.text
    assert "head.weight" in caplog.text


def test_same_head_gives_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save(_mlp().state_dict(), tmp_path / "w.pth")
    _mlp(tmp_path / "w.pth")
    assert not caplog.records


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("blocks.0.0.weight"), r"blocks\.0\.0\.weight is missing there"),
        (lambda s: s.pop("head.weight"), r"head\.weight is missing there"),
        (lambda s: s.update(extra=torch.zeros(1)), "extra is unknown here"),
        (
            lambda s: s.update({"blocks.0.0.bias": torch.zeros(9)}),
            r"blocks\.0\.0\.bias is \(9,\) there and \(4,\) here",
        ),
        (lambda s: s.update({f"x{i}": torch.zeros(1) for i in range(8)}), "and 3 more"),
    ],
)
def test_mismatch_names_the_tensors(tmp_path: Path, change: Any, message: str) -> None:
    state = dict(_mlp().state_dict())
    change(state)
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(ModelError, match=rf"w\.pth do not fit mlp: .*{message}"):
        _mlp(tmp_path / "w.pth")


def test_other_width_is_a_mismatch_not_another_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.save(_mlp(hidden=8).state_dict(), tmp_path / "w.pth")
    with pytest.raises(ModelError, match=r"head\.weight is \(3, 8\) there and \(3, 4\) here"):
        _mlp(tmp_path / "w.pth")
    assert not caplog.records


class Evil:
    """Would run code if it were unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("pwned").touch, ())


@pytest.mark.parametrize("name", ["w.pth", "w.safetensors"])
def test_missing_or_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(ModelError, match=rf"{path}: no such file"):
        read_weights(path)
    path.write_bytes(b"not weights")
    with pytest.raises(ModelError, match=rf"{path}: damaged"):
        read_weights(path)
    state = {"a": torch.zeros(100)}
    (save_file if name.endswith("s") else torch.save)(state, path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ModelError, match=rf"{path}: damaged") as caught:
        read_weights(path)
    assert "\n" not in str(caught.value)


def test_code_in_a_file_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, tmp_path / "w.pth")
    with pytest.raises(ModelError, match=r"w\.pth: damaged, or holds more than tensors") as caught:
        read_weights(tmp_path / "w.pth")
    assert "\n" not in str(caught.value)
    assert not Path("pwned").exists()


@pytest.mark.parametrize("content", [[1, 2], {"a": 1}, torch.zeros(1)])
def test_file_without_a_state_dict(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(ModelError, match=r"w\.pth: must hold a state dict"):
        read_weights(tmp_path / "w.pth")


def test_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.weights=.*w\.bin must end in \.safetensors, \.pth or \.pt"):
        read_weights(tmp_path / "w.bin")


@pytest.mark.parametrize("name", ["mlp", "vae", "gpt"])
def test_nothing_to_download(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"needs a file in model\.weights: .*{name}"):
        build_model(ModelConfig(name=name, pretrained=True), num_classes=2, input_shape=(4,))


class _FakeTorchvision:
    """Stands in for torchvision's weights enum of resnet18, without a network."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, state: dict[str, Tensor] | Exception) -> None:
        self.state = state
        self.asked: dict[str, Any] = {}
        models = types.ModuleType("torchvision.models")
        models.get_model_weights = self.get_model_weights  # type: ignore[attr-defined]
        package = types.ModuleType("torchvision")
        package.models = models  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "torchvision", package)
        monkeypatch.setitem(sys.modules, "torchvision.models", models)

    def get_model_weights(self, name: str) -> Any:
        self.asked["name"] = name
        return types.SimpleNamespace(DEFAULT=self)

    def get_state_dict(self, **options: Any) -> dict[str, Tensor]:
        self.asked.update(options)
        if isinstance(self.state, Exception):
            raise self.state
        return self.state


def test_torchvision_weights(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    # torchvision's oldest files have no batch counts; torch fills them in.
    state = {k: v for k, v in ResNet("resnet18", 1000).state_dict().items() if "num_batches" not in k}
    fake = _FakeTorchvision(monkeypatch, state)
    model = build_model(ModelConfig(name="resnet18", pretrained=True), num_classes=10, input_shape=(3, 32, 32))
    assert fake.asked == {"name": "resnet18", "check_hash": True, "weights_only": True}
    assert torch.equal(model.conv1.weight, state["conv1.weight"])  # the usual stem, though the images are small
    assert torch.equal(model.layer4[1].bn2.weight, state["layer4.1.bn2.weight"])
    assert model.fc.out_features == 10
    assert "torchvision's resnet18" in caplog.text


def test_torchvision_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    _FakeTorchvision(monkeypatch, OSError("no route to host"))
    with pytest.raises(ModelError, match=r"cannot be downloaded: no route to host; put a file into model\.weights"):
        build_model(ModelConfig(name="resnet18", pretrained=True), num_classes=10, input_shape=None)


def test_torchvision_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="torchvision")

    monkeypatch.setattr("distributed_training.runtime.imports.importlib.import_module", missing)
    with pytest.raises(MissingDependencyError, match=r"resnet18.*distributed-training\[vision\]"):
        build_model(ModelConfig(name="resnet18", pretrained=True), num_classes=10, input_shape=None)
