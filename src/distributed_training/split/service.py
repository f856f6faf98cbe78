"""A model that validates or predicts for clients elsewhere: several at a time, one after the other, until it is ended.

One thread has the model and takes the clients' batches in turn (`feed.turns`); each connection has a thread of its own.
Nothing of a client is kept between two batches, so one that goes away concerns nobody, and one that comes back goes on.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from distributed_training.data.nested import map_tensors
from distributed_training.feed.settings import FeedSettings
from distributed_training.feed.tensors import as_raw
from distributed_training.feed.turns import ServiceFigures, Turn, Turns
from distributed_training.runtime.errors import ConfigError, DistributedTrainingError, ModelError
from distributed_training.runtime.signals import StopSignals
from distributed_training.split.inference import Inference
from distributed_training.split.listening import Address, Listening, listen
from distributed_training.split.settings import feed_settings
from distributed_training.split.validation import Validation
from distributed_training.training.evaluation import evaluating
from distributed_training.training.forms import Answer
from distributed_training.training.trainer import Trainer
from distributed_training.wire import Reason, pack_batch

logger = logging.getLogger(__name__)

_LOOK = 0.5  # seconds between two looks at whether to end
_NO_IDS = np.zeros(0, np.int64)
_ENDS = 8  # values of a tensor's beginning and end that its fingerprint holds


class Mode(Protocol):
    """What a service does with a batch."""

    name: str
    need_loss: bool

    def read(self, facts: Mapping[str, Any]) -> Any:
        """What a client asks for. It comes from the network: a ConfigError for what makes no sense."""

    def check(self, data: Any) -> None:
        """Refuse data, by a DataError, that would harm more than the client that sent it."""

    def result(self, answer: Answer, options: Any) -> Any:
        """What the client gets for a batch: nested tensors and numbers."""


MODES: dict[str, Callable[[Trainer], Mode]] = {"validation": Validation, "inference": Inference}


def serve_clients(
    trainer: Trainer,
    mode: str,
    address: Address,
    *,
    tasks: int | None = None,
    on_listening: Callable[[Listening], None] | None = None,
) -> ServiceFigures:
    """Serve validation or inference with a trainer's model until Ctrl-C or SIGTERM, or until so many tasks are done.

    Args:
        trainer: has the model, on its device, and the loss.
        mode: validation or inference. Clients that ask for the other are refused.
        address: where to listen, and who may come.
        tasks: end after so many clients had all their results; left out, go on.
        on_listening: called when clients may come; left out, the link is shown on the screen.
    """
    service = ModelService(trainer, mode, feed_settings(trainer.config))
    listening = listen(trainer.config, address, service=service.turns)
    finished = False
    try:
        if on_listening is not None:
            on_listening(listening)
        else:
            listening.announce("clients", f"dtrain {'validate' if mode == 'validation' else 'predict'} CONFIG --to")
        with StopSignals() as signals:
            figures = service.run(lambda: signals.received is not None, tasks)
        finished = True
        return figures
    finally:
        service.turns.stop()
        listening.close(finished=finished)


class _Launched(NamedTuple):
    """A batch that the device is busy with."""

    turn: Turn
    result: Any
    event: Any


class ModelService:
    """The thread that has the model. `turns` is what a `FeedServer` takes as its service."""

    def __init__(self, trainer: Trainer, mode: str, settings: FeedSettings) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r} is none of training, {', '.join(MODES)}")
        if trainer.strategy.world_size > 1:
            raise ConfigError(
                f"a service for {mode} runs in one process, not in {trainer.strategy.world_size}; start it without a "
                "launcher, several times at different ports if there are several GPUs"
            )
        self._engine, self._mode = trainer.engine, MODES[mode](trainer)
        self._device = trainer.device
        self.turns = Turns(mode, settings, self._mode.read)
        self.turns.facts = {"model": model_fingerprint(trainer.model)}

    def run(self, told_to_stop: Callable[[], bool] = lambda: False, tasks: int | None = None) -> ServiceFigures:
        """Answer clients until told to stop, asked about twice a second, or until so many tasks are done."""
        turns, launched = self.turns, None
        with evaluating(self._engine.model):
            while not (turns.stopped or told_to_stop() or (tasks is not None and turns.figures().tasks >= tasks)):
                # While the device computes one batch, the next one is launched: it need not wait for Python.
                turn = turns.take(0.0 if launched is not None else _LOOK)
                before, launched = launched, self._launch(turn) if turn is not None else None
                if before is not None:
                    self._deliver(before)
        return turns.figures()

    def _launch(self, turn: Turn) -> _Launched | None:
        engine, mode = self._engine, self._mode
        try:
            mode.check(turn.batch.data)
            with engine.autocast:
                answer = engine.answer(engine.place(turn.batch), need_loss=mode.need_loss)
            result = map_tensors(self._to_host, mode.result(answer, turn.options))
            event = None
            if self._device.type == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self._device))
            return _Launched(turn, result, event)
        except Exception as error:
            self._failed(turn, error)
            return None

    def _deliver(self, launched: _Launched) -> None:
        try:
            if launched.event is not None:
                launched.event.synchronize()
            packed = pack_batch(0, launched.turn.step, _NO_IDS, launched.result, adapt=as_raw)
        except Exception as error:
            self._failed(launched.turn, error)
            return
        self.turns.answered(launched.turn, packed)

    def _to_host(self, tensor: Tensor) -> Tensor:
        """On its way to the CPU; there when the event that is recorded next has happened."""
        if tensor.device.type != "cuda":
            return tensor.cpu()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def _failed(self, turn: Turn, error: Exception) -> None:
        """One client's batch cannot be computed. The others go on, unless the device itself is out of order."""
        samples = len(turn.batch.ids)
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            text = f"{self._device} ran out of memory with a batch of {samples} samples; take a smaller batch size"
        elif isinstance(error, DistributedTrainingError):
            text = str(error)
        else:
            logger.warning("%s: a batch failed", turn.client.seat.name, exc_info=error)
            first_line = (str(error).splitlines() or [""])[0]
            text = f"the model failed on a batch of {samples} samples: {type(error).__name__}: {first_line}"
        self.turns.failed(turn, Reason.CONFIG, text)
        if self._device.type == "cuda":
            try:
                torch.cuda.synchronize(self._device)
            except RuntimeError as broken:
                raise ModelError(
                    f"{self._device} is out of order since a batch failed; start again: {text}"
                ) from broken


def model_fingerprint(model: nn.Module) -> str:
    """A short string, equal for equal weights: a client that comes back must find the model it began with."""
    digest = hashlib.sha256(type(model).__qualname__.encode())
    with torch.no_grad():
        for name, value in model.state_dict().items():
            digest.update(f"{name} {type(value).__name__}".encode())
            if not isinstance(value, Tensor):
                continue
            flat = value.detach().flatten()
            parts = [flat[:_ENDS].double(), flat[-_ENDS:].double(), flat.double().sum()[None]]
            digest.update(f"{tuple(value.shape)} {value.dtype}".encode())
            digest.update(torch.cat(parts).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
