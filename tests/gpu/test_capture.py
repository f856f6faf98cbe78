"""Steps replayed as a CUDA graph: the training is that of eager steps, and what cannot be recorded runs eagerly."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from tests.training.examples import assert_same_weights, config
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from distributed_training import Callback, Config, Trainer
from distributed_training.runtime.errors import ConfigError, DataError
from distributed_training.training import kernels

REPLAYED = "steps are replayed as one CUDA graph"


def data(samples: int = 500) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (samples,), generator=numbers)
    return torch.randn(4, 20, generator=numbers)[labels] + torch.randn(samples, 20, generator=numbers), labels


def network(*extra: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.ReLU(), *extra, nn.Linear(64, 4))


def trained(net: nn.Module, *callbacks: Callback, inputs: Any = None, run_dir: Any = False, **settings: Any) -> Trainer:
    chosen = config(**{"training__device": "cuda", "training__batch_size": 32, "training__epochs": 3, **settings})
    own = [*callbacks, Recordings()] if settings.get("training__capture") == "on" else callbacks
    with closing(Trainer(net, config=chosen, run_dir=run_dir, callbacks=own)) as trainer:
        trainer.train(data() if inputs is None else inputs, resume="auto" if run_dir else "never")
    return trainer


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("extra", [{}, {"training__gradient_accumulation": 2, "training__gradient_clip": 0.5}])
def test_the_training_is_that_of_eager_steps(precision, optimizer, extra, caplog) -> None:  # type: ignore[no-untyped-def]
    caplog.set_level(logging.INFO)
    settings = {"training__precision": precision, "training__optimizer": optimizer, **extra}
    replayed, eager = network(), network()
    one = trained(replayed, training__capture="on", **settings)
    assert REPLAYED in caplog.text
    assert "the same bits" in caplog.text
    other = trained(eager, training__capture="off", **settings)
    assert one.last_metrics["train_loss"] == pytest.approx(other.last_metrics["train_loss"], rel=1e-4)
    for name, weight in replayed.state_dict().items():
        torch.testing.assert_close(weight, eager.state_dict()[name], rtol=1e-3, atol=1e-5, msg=name)


def test_a_resumed_training_ends_with_the_same_bits(in_tmp) -> None:  # type: ignore[no-untyped-def]
    class Stop(Callback):
        def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
            if trainer.cursor.global_step == 21:
                trainer.stop("test")

    whole, parts = network(), network()
    trained(whole, run_dir="whole", training__capture="on")
    trained(parts, Stop(), run_dir="parts", training__capture="on")
    trained(parts, run_dir="parts", training__capture="on")
    assert_same_weights(whole, parts)


class Branching(nn.Module):
    """Looks at its input to decide what to do."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Moody(nn.Module):
    """Draws on Python's side, where a graph does not."""

    def forward(self, x: Tensor) -> Tensor:
        return x * random.random()


class Hooked(nn.Module):
    """Has a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("part", "why"), [(Branching, "captur"), (Moody, "differ from eager ones"), (Hooked, "has hooks")]
)
def test_what_cannot_be_recorded_runs_eagerly(part: type[nn.Module], why: str, caplog) -> None:  # type: ignore[no-untyped-def]
    caplog.set_level(logging.INFO)
    random.seed(0)
    net = network(part(), nn.Dropout(0.1))
    trainer = trained(net)
    assert "steps run eagerly, not as a CUDA graph" in caplog.text
    assert why in caplog.text
    assert trainer.cursor.global_step == 48
    if part is not Moody:
        eager = network(part(), nn.Dropout(0.1))
        trained(eager, training__capture="off")
        for name, weight in net.state_dict().items():
            torch.testing.assert_close(weight, eager.state_dict()[name], rtol=1e-3, atol=1e-5, msg=name)
    with pytest.raises(ConfigError, match="cannot be recorded as a CUDA graph"):
        trained(network(part()), training__capture="on")


def test_a_step_that_is_not_finite_is_skipped_inside_the_graph(caplog) -> None:  # type: ignore[no-untyped-def]
    inputs, labels = data()
    inputs[250] = float("nan")
    caplog.set_level(logging.INFO)
    net = nn.Sequential(nn.Linear(20, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 4))
    chosen = config(training__device="cuda", training__batch_size=32, training__epochs=2, training__capture="on")
    with closing(Trainer(net, config=chosen, run_dir=False)) as trainer:
        result = trainer.train((inputs, labels))
    assert result.skipped_steps == 2
    assert all(bool(torch.isfinite(weight).all()) for weight in net.parameters())
    assert REPLAYED in caplog.text


@pytest.mark.parametrize("settings", [{}, {"training__gradient_clip": 0.5}])  # the norm is a tensor that is held
def test_a_setting_changed_between_epochs_has_the_step_recorded_again(settings, caplog) -> None:  # type: ignore[no-untyped-def]
    class Change(Callback):
        def on_epoch_start(self, trainer: Trainer, epoch: int) -> None:
            if epoch == 1:
                trainer.optimizer.param_groups[0]["weight_decay"] = 0.5

    caplog.set_level(logging.INFO)
    replayed, eager = network(), network()
    trained(replayed, Change(), training__capture="on", **settings)
    assert caplog.text.count(REPLAYED) == 2
    trained(eager, Change(), training__capture="off", **settings)
    for name, weight in replayed.state_dict().items():
        torch.testing.assert_close(weight, eager.state_dict()[name], rtol=1e-3, atol=1e-5, msg=name)


def test_batches_of_many_shapes_run_eagerly(caplog) -> None:  # type: ignore[no-untyped-def]
    def ragged(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        wide = 20 + sum(int(label) for _, label in rows) % 16
        return nn.functional.pad(torch.stack([x for x, _ in rows]), (0, wide - 20)), torch.stack([y for _, y in rows])

    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :20]

    caplog.set_level(logging.INFO)
    net = nn.Sequential(Narrow(), network())
    batches = DataLoader(TensorDataset(*data(1500)), batch_size=16, shuffle=True, collate_fn=ragged)
    trained(net, inputs=batches)
    assert "batches were of other shapes than the" in caplog.text


def test_batches_of_a_few_shapes_are_all_recorded() -> None:
    replayed, eager = network(), network()
    one = trained(
        replayed, training__capture="on", training__batch_size=48, training__epochs=5
    )  # the last of an epoch has 20 samples
    assert [known.trusted for known in one.recordings] == [True, True]  # type: ignore[attr-defined]
    trained(eager, training__capture="off", training__batch_size=48, training__epochs=5)
    assert_close(replayed, eager)


class Recordings(Callback):
    """Keeps what was recorded, for the test to look at."""

    def on_train_end(self, trainer: Trainer, status: str) -> None:
        trainer.recordings = list(trainer._session.loop.step._recorded)  # type: ignore[attr-defined]


@pytest.fixture
def _kernels_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For trainings with deterministic kernels, which are a matter of the whole process."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    yield
    torch.use_deterministic_algorithms(False)


def pictures() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (300, 3, 8, 8), dtype=torch.uint8, generator=numbers), torch.arange(300) % 4


def small_convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


@pytest.mark.parametrize("capture", ["on", "off"])
@pytest.mark.parametrize("settings", [{}, {"data__augment__flip": True, "data__augment__crop": 1}])
def test_data_on_the_gpu_trains_as_data_on_the_host(capture: str, settings: dict[str, Any]) -> None:
    here, there = small_convolution(), small_convolution()
    trained(here, inputs=pictures(), training__capture=capture, data__resident="on", **settings)
    trained(there, inputs=pictures(), training__capture=capture, data__resident="off", **settings)
    assert_same_weights(here, there)


def test_data_that_cannot_lie_on_the_gpu() -> None:
    class Own(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> Any:
            return torch.full((20,), float(index)), index % 4

    trained(network(), inputs=Own())
    with pytest.raises(ConfigError, match=r"data\.resident=on: .*not made of arrays"):
        trained(network(), inputs=Own(), data__resident="on")


def test_labels_out_of_range_are_named_before_the_gpu_sees_them() -> None:
    inputs, labels = data()
    labels[123] = 9
    net = network()
    net.num_classes = 4  # type: ignore[assignment]
    with pytest.raises(DataError, match=r"sample 123 has label 9"):
        trained(net, inputs=(inputs, labels))


def test_a_long_training_gets_compiled_kernels_and_resumes_with_them(in_tmp, caplog, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    class Stop(Callback):
        def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
            if trainer.cursor.global_step == 37:
                trainer.stop("test")

    monkeypatch.setattr(kernels, "_GAIN", 1e9)  # so small a model gains nothing
    monkeypatch.setattr(kernels, "_SECONDS", -1e9)
    caplog.set_level(logging.INFO)
    settings = {"training__capture": "on", "training__compile": "auto", "training__precision": "tf32"}
    whole, parts, plain = (plain_network() for _ in range(3))
    one = trained(whole, run_dir="whole", run__cache=str(in_tmp / "a"), **settings)
    assert "used from here on" in caplog.text
    remembered = json.loads((in_tmp / "a" / "kernels.json").read_text())
    assert [entry["gpu"] for entry in remembered.values()] == [torch.cuda.get_device_name()]
    trained(parts, Stop(), run_dir="parts", run__cache=str(in_tmp / "b"), **settings)
    assert "kernels compiled as before" not in caplog.text
    trained(parts, run_dir="parts", run__cache=str(in_tmp / "b"), **settings)
    assert "kernels compiled as before" in caplog.text
    assert_same_weights(whole, parts)
    other = trained(plain, training__capture="off", training__compile="off", training__precision="tf32")
    assert one.last_metrics["train_loss"] == pytest.approx(other.last_metrics["train_loss"], rel=0.02)


def test_compiled_dropout_is_no_reason_to_distrust_compiled_kernels(in_tmp, caplog, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(kernels, "_GAIN", 1e9)
    monkeypatch.setattr(kernels, "_SECONDS", -1e9)
    caplog.set_level(logging.INFO)
    trained(network(), run__cache=str(in_tmp))
    assert "used from here on" in caplog.text


@pytest.mark.usefixtures("_kernels_as_before")
def test_settings_left_at_auto_are_measured_once_and_remembered(in_tmp, caplog) -> None:  # type: ignore[no-untyped-def]
    class Stop(Callback):
        def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
            if trainer.cursor.global_step == 20:
                trainer.stop("test")

    def train(net: nn.Module, *callbacks: Callback, run: str, **settings: Any) -> Trainer:
        chosen = {
            "training__precision": "auto",
            "run__cache": str(in_tmp / "cache"),
            "training__epochs": 200,
            "training__deterministic": True,  # cuDNN adds up some gradients in any order
            **settings,
        }
        return trained(net, *callbacks, inputs=pictures(), run_dir=run, run__stop_after_steps=40, **chosen)

    caplog.set_level(logging.INFO)
    whole, parts = small_convolution(), small_convolution()
    one = train(whole, run="whole")
    assert "measured: bf16 channels last" in caplog.text
    assert {one.config.training.precision, one.config.training.channels_last}.isdisjoint({"auto"})
    saved = Config.from_file("whole/config.yaml").training
    assert (saved.precision, saved.channels_last) == (one.config.training.precision, one.config.training.channels_last)
    caplog.clear()
    train(parts, Stop(), run="parts")
    assert "as measured before on this GPU" in caplog.text
    caplog.clear()
    train(parts, run="parts", run__cache="another")
    assert "measured" not in caplog.text  # a resumed training goes on as it began
    assert_same_weights(whole, parts)


def plain_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 4))


def assert_close(net: nn.Module, other: nn.Module, rtol: float = 1e-3) -> None:
    for name, weight in net.state_dict().items():
        torch.testing.assert_close(weight, other.state_dict()[name], rtol=rtol, atol=rtol / 100, msg=name)
