"""Where a training starts, and what may differ from the run it goes on with."""

from __future__ import annotations

import logging
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.examples import StopAt, config, loader, model
from torch import nn

from distributed_training.config import Config
from distributed_training.runtime.errors import CheckpointError, RunDirectoryError
from distributed_training.training import Callback, Trainer, TrainingResult


def run(
    *callbacks: Callback, epochs: int = 1, resume: Any = None, run_dir: Any = None, batch_size: int = 8, **changes: Any
) -> TrainingResult:
    """Train in the current folder."""
    own = Trainer(model(), config=config(**changes), callbacks=callbacks, run_dir=run_dir)
    return own.train(loader(batch_size=batch_size), epochs=epochs, resume=resume)


@pytest.fixture(autouse=True)
def _here(in_tmp: Path) -> None:
    """Runs are written to the folder of the test."""


def test_never_makes_a_new_run_each_time() -> None:
    first, second = run(), run()
    assert first.run_dir != second.run_dir
    assert first.run_dir is not None
    assert first.run_dir.parent == Path("runs")
    assert second.steps == 6


def test_never_does_not_overwrite_a_run() -> None:
    run(run__name="mine")
    with pytest.raises(RunDirectoryError, match="a run of this name exists; continue it with --resume auto"):
        run(run__name="mine")
    with pytest.raises(RunDirectoryError, match="exists"):
        run(run_dir="runs/mine")


def test_auto_goes_on_with_the_newest_run() -> None:
    run()
    second = run()
    third = run(epochs=2, resume="auto")
    assert third.run_dir == second.run_dir
    assert third.steps == 12


def test_auto_starts_anew_where_nothing_is() -> None:
    result = run(resume="auto")
    assert (result.status, result.steps) == ("completed", 6)


def test_auto_in_a_given_folder_starts_or_goes_on_there() -> None:
    assert run(resume="auto", run_dir="here").run_dir == Path("here")
    again = run(resume="auto", run_dir="here", epochs=2)
    assert (again.run_dir, again.steps) == (Path("here"), 12)


def test_auto_by_name() -> None:
    run(run__name="a")
    run(run__name="b")
    assert run(run__name="a", resume="auto", epochs=2).run_dir == Path("runs/a")


def test_auto_with_no_usable_checkpoint_starts_anew_in_the_same_run(caplog: pytest.LogCaptureFixture) -> None:
    first = run(run_dir="here")
    assert first.run_dir is not None
    for path in first.run_dir.glob("checkpoints/*"):
        (path / "state.safetensors").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        again = run(run_dir="here", resume="auto")
    assert "passed over" in caplog.text
    assert "here: no usable checkpoint: starting anew there" in caplog.text
    assert again.steps == 6


def test_a_training_that_was_complete_stays_so() -> None:
    run(run_dir="here")
    again = run(run_dir="here", resume="auto")
    assert (again.status, again.steps) == ("completed", 6)


@pytest.mark.parametrize("what", ["here", "here/checkpoints", "here/checkpoints/step-0000000006"])
def test_the_path_of_a_run_goes_on_in_it(what: str) -> None:
    run(run_dir="here")
    again = run(resume=what, epochs=2)
    assert again.run_dir is not None
    assert again.run_dir.resolve() == Path("here").resolve()
    assert again.steps == 12


@pytest.mark.parametrize(("folder", "what"), [("here", "."), ("here/checkpoints", "step-0000000006")])
def test_a_relative_path_from_inside_the_run_goes_on_in_it(
    folder: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(run_dir="here")
    own = Path("here").resolve()
    monkeypatch.chdir(folder)
    again = run(resume=what, epochs=2)
    assert again.run_dir is not None
    assert again.run_dir.resolve() == own
    assert again.steps == 12


def test_an_earlier_checkpoint_starts_a_new_run_of_its_own() -> None:
    first = run(run_dir="here", epochs=3, checkpoint__keep=9)
    assert first.run_dir is not None
    before = sorted(path.name for path in first.run_dir.glob("checkpoints/*"))
    fork = run(resume="here/checkpoints/step-0000000006", epochs=2)
    assert fork.run_dir != first.run_dir
    assert fork.steps == 12
    assert sorted(path.name for path in first.run_dir.glob("checkpoints/*")) == before


def test_a_path_and_a_folder_start_a_new_run_in_the_folder() -> None:
    run(run_dir="here")
    assert run(resume="here", run_dir="there", epochs=2).run_dir == Path("there")


def test_checkpoints_that_were_copied_elsewhere_start_a_new_run() -> None:
    run(run_dir="here")
    shutil.copytree("here/checkpoints", "backup")
    again = run(resume="backup", epochs=2)
    assert again.steps == 12
    assert again.run_dir is not None
    assert again.run_dir.parent == Path("runs")


def test_a_path_that_is_not_there_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such run or checkpoint"):
        run(resume="nowhere")
    Path("empty").mkdir()
    with pytest.raises(CheckpointError, match="empty: no usable checkpoint there"):
        run(resume="empty")


def test_without_files_there_is_nothing_to_resume() -> None:
    assert run(run_dir=False, resume="auto").run_dir is None
    with pytest.raises(CheckpointError, match="run_dir=False asks for none"):
        run(run_dir=False, resume="here")


def test_the_config_can_say_resume() -> None:
    run(run_dir="here")
    assert run(run_dir="here", checkpoint__resume="auto", epochs=2).steps == 12
    assert "resume: never" in Path("here/config.yaml").read_text()


def test_another_batch_size_in_the_middle_of_an_epoch_is_refused_by_name() -> None:
    run(StopAt(3), run_dir="here")
    with pytest.raises(CheckpointError, match=r"middle of an epoch of other batches: batch_size was 8 and is 4"):
        run(run_dir="here", resume="auto", batch_size=4)


def test_other_data_in_the_middle_of_an_epoch_is_refused() -> None:
    run(StopAt(3), run_dir="here")
    own = Trainer(model(), config=config(), run_dir="here")
    with pytest.raises(CheckpointError, match=r"dataset was \w+ and is \w+; samples was 44 and is 40"):
        own.train(loader(40), epochs=1, resume="auto")


def test_another_batch_size_at_the_end_of_an_epoch_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    run(run_dir="here")
    with caplog.at_level(logging.WARNING):
        again = run(run_dir="here", resume="auto", batch_size=22, epochs=2)
    assert again.steps == 8
    assert "with changes: batch_size was 8 and is 22" in caplog.text


def test_another_plan_is_refused_always(monkeypatch: pytest.MonkeyPatch) -> None:
    from distributed_training.data import plan

    run(run_dir="here")
    monkeypatch.setattr(plan, "PLAN_VERSION", 2)
    with pytest.raises(CheckpointError, match="plan_version was 1 and is 2"):
        run(run_dir="here", resume="auto", epochs=2)


def test_changed_settings_are_told(caplog: pytest.LogCaptureFixture) -> None:
    run(run_dir="here")
    with caplog.at_level(logging.WARNING):
        run(run_dir="here", resume="auto", epochs=2, training__lr=0.5, model__args={"x": 1}, run__deadline=7.0)
    assert "training.lr was 0.05 and is 0.5" in caplog.text
    assert "model.args.x was None and is 1" in caplog.text
    assert "deadline" not in caplog.text


def test_unchanged_settings_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    run(StopAt(3), run_dir="here")
    with caplog.at_level(logging.WARNING):
        run(run_dir="here", resume="auto")
    assert caplog.text == ""


def test_another_model_is_an_error_that_names_what_differs() -> None:
    run(run_dir="here")
    own = Trainer(model()[:1], config=config(), run_dir="here")
    with pytest.raises(CheckpointError, match="weights do not fit this Sequential"):
        own.train(loader(), epochs=2, resume="auto")


def test_a_constant_rate_is_the_saved_one_unless_the_config_names_another(in_tmp: Path) -> None:
    def train(lr: float, epochs: int) -> float:
        config = Config().replace(
            **{"training.schedule": "constant", "training.warmup_epochs": 0, "training.lr": lr, "run.progress": "off"}
        )
        own = Trainer(torch.nn.Linear(2, 2), config=config, run_dir="runs/constant")
        own.train((torch.randn(64, 2), torch.zeros(64).long()), epochs=epochs, resume="auto")
        return own.optimizer.param_groups[0]["lr"]

    assert train(0.5, 1) == 0.5
    assert train(0.5, 2) == 0.5
    assert train(0.25, 3) == 0.25


class TestChannelsInnermost:
    """Weights that lie in another order than their shape says; the state of their optimizer has to lie as they do."""

    @staticmethod
    def network(*, turned: bool) -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
        return net.to(memory_format=torch.channels_last) if turned else net  # type: ignore[call-overload, no-any-return]

    @staticmethod
    def train(
        net: nn.Module, *callbacks: Callback, optimizer: Any = None, resume: str = "never", **changes: Any
    ) -> None:
        numbers = torch.Generator().manual_seed(1)
        pictures = torch.randn(64, 3, 8, 8, generator=numbers), torch.arange(64) % 4
        chosen = config(training__batch_size=8, **changes)
        folder = changes.get("run__name", False) and f"runs/{changes['run__name']}"
        with closing(Trainer(net, optimizer=optimizer, config=chosen, callbacks=callbacks, run_dir=folder)) as own:
            own.train(pictures, epochs=2, resume=resume)

    @pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
    @pytest.mark.parametrize("by", ["the setting", "the user"])
    def test_a_resumed_training_ends_with_the_same_bits(self, optimizer: str, by: str) -> None:
        changes = {"training__optimizer": optimizer, "training__channels_last": "on" if by == "the setting" else "off"}
        whole, first, second = (self.network(turned=by == "the user") for _ in range(3))
        self.train(whole, run__name="whole", **changes)
        self.train(first, StopAt(5), run__name="parts", **changes)
        self.train(second, run__name="parts", resume="auto", **changes)
        for name, weight in whole.state_dict().items():
            assert torch.equal(second.state_dict()[name], weight), name

    def test_an_optimizer_that_has_taken_steps_before_weights_are_turned(self) -> None:
        trained = []
        for choice in ("on", "off"):
            net = self.network(turned=False)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)
            for p in net.parameters():
                p.grad = torch.arange(p.numel()).view_as(p) / p.numel()
            optimizer.step()
            optimizer.zero_grad()
            self.train(net, optimizer=optimizer, training__channels_last=choice)
            trained.append(net)
        for turned, plain in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
            torch.testing.assert_close(turned, plain, rtol=1e-3, atol=1e-5)
