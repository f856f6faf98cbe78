"""Settings left at `auto` that a short measurement decides: precision and the order of convolution weights on a GPU.

What usually is best (bf16, channels innermost) is measured beside the alternative, on copies of the model and the
optimizer and one batch of the data; another choice is made only where it is clearly faster. The choice is made once,
before the first step, and stands in the run's config: a resumed training does not measure, nor does the next training
of the same model on the same kind of GPU, which finds it remembered.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from distributed_training.config import Config
from distributed_training.data import Loader
from distributed_training.data.base import Batch, BatchSource
from distributed_training.runtime.errors import DistributedTrainingError
from distributed_training.runtime.seeds import generators_state, restore_generators
from distributed_training.strategies.channels import has_convolutions
from distributed_training.training.engine import Engine
from distributed_training.training.memory import Memory, facts_of
from distributed_training.training.rates import DeviceRates
from distributed_training.training.recording import StepRecorder, Unfit, shape_of
from distributed_training.training.step import TrainStep, check_labels
from distributed_training.training.step_state import StepState

if TYPE_CHECKING:
    from distributed_training.training.trainer import Trainer

logger = logging.getLogger(__name__)

_CLEARLY = 0.9  # share of the usual choice's time that another must stay below
_STEPS = 1000  # of a training, for which a second of measuring is not too much
_WARM, _TIMED = 4, 5
_MEMORY = 0.2  # of the free memory that the weights may take for a copy of all to be made
PRECISION, CHANNELS_LAST = "training.precision", "training.channels_last"


def settle(trainer: Trainer, source: BatchSource, steps: int | None, resumed_from: Path | None) -> dict[str, str]:
    """The settings to use in place of `auto`; none where there is nothing to choose or to measure.

    `resumed_from`: the run that is continued, whose choices hold.
    """
    training = trainer.config.training
    candidates = _candidates(trainer)
    if not candidates or "engine" in vars(trainer):
        return {}
    if resumed_from is not None:
        return _chosen_before(resumed_from, list(candidates[0]))
    if not isinstance(source, Loader) or steps is None or steps < _STEPS or not _has_room(trainer):
        return {}
    _, batch = next(source.batches(0))
    if trainer.num_classes:
        check_labels(batch, trainer.num_classes)
    memory = Memory(Path(trainer.config.run.cache).expanduser() / "settings.json")
    about = {**_about(trainer, batch), "auto": sorted(candidates[0]), "capture": training.capture}
    known = memory.get(about)
    if known is not None and known.get("chosen") in candidates:
        logger.info("as measured before on this GPU: %s", known.get("text", known["chosen"]))
        return dict(known["chosen"])
    generators = generators_state()
    try:
        chosen, text = _measure(trainer, batch, candidates)
    except (DistributedTrainingError, RuntimeError, TypeError, ValueError) as error:  # a model may refuse to be copied
        logger.debug("settings were not measured: %s", error)
        return {}
    finally:
        restore_generators(generators)
        torch.cuda.empty_cache()
    logger.info("measured: %s", text)
    memory.put(about, {"chosen": chosen, "text": text})
    return chosen


def _candidates(trainer: Trainer) -> list[dict[str, str]]:
    """What the settings left at auto usually should be, then what else they could be."""
    training = trainer.config.training
    if not trainer.strategy.capturable or torch.cuda.get_device_capability(trainer.device) < (8, 0):
        return []
    usual = {PRECISION: "bf16"} if training.precision == "auto" else {}
    found = [{PRECISION: "tf32"}] if usual else []
    reduced = training.precision in ("auto", "bf16", "fp16")
    if training.channels_last == "auto" and reduced and has_convolutions(trainer.model):
        found = [{**other, CHANNELS_LAST: "off"} for other in [*found, usual]]  # tf32 has no use for that order
        usual = {**usual, CHANNELS_LAST: "on"}
    return [usual, *found] if found else []


def _chosen_before(run: Path, names: list[str]) -> dict[str, str]:
    """What the run's config says of these settings."""
    try:
        config = Config.from_file(run / "config.yaml")
    except (DistributedTrainingError, OSError):
        return {}
    values = {name: str(config.get(name)) for name in names}
    return {name: value for name, value in values.items() if value != "auto"}


def _measure(trainer: Trainer, batch: Batch, candidates: list[dict[str, str]]) -> tuple[dict[str, str], str]:
    """The choice, and in words what each would bring."""
    times = [_seconds(trainer, batch, settings) for settings in candidates]
    fastest = min(range(len(times)), key=times.__getitem__)
    chosen = candidates[fastest if times[fastest] < _CLEARLY * times[0] else 0]
    words = [f"{_words(settings)} {time * 1000:.3g} ms a step" for settings, time in zip(candidates, times)]
    return chosen, f"{', '.join(words)}; {_words(chosen)} from here on"


def _words(settings: dict[str, str]) -> str:
    order = {"on": " channels last", "off": " channels first"}
    return (settings.get(PRECISION, "") + order.get(settings.get(CHANNELS_LAST, ""), "")).strip()


def _seconds(trainer: Trainer, batch: Batch, settings: dict[str, str]) -> float:
    """A step's time with these settings: replayed where it can be, else eager."""
    config, strategy = trainer.config.replace(**settings), trainer.another_strategy()
    model, optimizer = copy.deepcopy((trainer.model, trainer.optimizer))
    try:
        engine = Engine(model, optimizer, strategy, trainer.criterion, config, trainer.device_transform)
        step = TrainStep(engine, config.training.gradient_accumulation, config.training.seed)
        state, rates = StepState(model, optimizer, strategy), DeviceRates(optimizer, strategy.device)
        model.train()
        for number in range(_WARM):
            step(batch, 0, number)
        times = [state.timed(lambda: step(batch, 0, 0))[1] for _ in range(_TIMED)]
        if config.training.capture != "off":
            times += _replays(step, engine, state, rates, batch)
        return min(times)
    finally:
        strategy.teardown()


def _replays(step: TrainStep, engine: Engine, state: StepState, rates: DeviceRates, batch: Batch) -> list[float]:
    recorder = StepRecorder(step, engine, rates)
    rows, data = step.place(batch, 0, 0, may_stay=True), step.place(batch, 0, 0)
    try:
        recorder.check_fitness()
        rates.set()
        recording = recorder.record(rows, data, batch)
    except (Unfit, RuntimeError):
        engine.strategy.abandon_step()
        return []
    return [state.timed(lambda: recording.replay(rows))[1] for _ in range(_TIMED)]


def _about(trainer: Trainer, batch: Batch) -> dict[str, Any]:
    data = batch.data.gather() if hasattr(batch.data, "gather") else batch.data
    return facts_of(trainer.model, trainer.optimizer, shape_of(data, batch), trainer.device)


def _has_room(trainer: Trainer) -> bool:
    weights = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    free, _ = torch.cuda.mem_get_info(trainer.device)
    return 4 * weights <= _MEMORY * free
