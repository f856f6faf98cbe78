"""Real DeepSpeed: ZeRO stages 0 to 3, offload, and the user's own DeepSpeed JSON."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed_training.runtime.environment import environment_for_a_while
from distributed_training.runtime.errors import ConfigError, ModelError
from distributed_training.runtime.imports import require
from distributed_training.strategies.base import Place, StepResult, StepSettings
from distributed_training.strategies.batchnorm import synchronise_batchnorm
from distributed_training.strategies.deepspeed_settings import Combined, combine, is_lossy, read_file
from distributed_training.strategies.deepspeed_state import DividedState, Remembered, WholeState
from distributed_training.strategies.distributed import Distributed
from distributed_training.strategies.fused import use_fused
from distributed_training.strategies.update import Update


class DeepSpeed(Distributed):
    """DeepSpeed's engine runs forward, backward and step; the loop, the data and the checkpoints are ours."""

    name = "deepspeed"

    def __init__(self, place: Place) -> None:
        self._file = read_file(place.config.deepspeed_config)
        self._library = import_deepspeed(place.device)
        super().__init__(place)
        self.exact = not is_lossy(self._file)
        self._place = place
        self._quiet = _Quiet()
        self._local_rank = _LocalRank(str(place.device.index or 0))
        self._engine: Any = None
        self._cast: Any = None

    def setup(self, model: nn.Module, optimizer: Optimizer | None, settings: StepSettings) -> nn.Module:
        if self.config.sync_batchnorm:
            synchronise_batchnorm(model, self)
        self.start_alike(model)
        self._release()
        if optimizer is None:  # evaluation needs nothing of DeepSpeed
            return super().setup(model, None, settings)
        _check_dimensions(model)
        told = self._told = combine(self._file, self._place, settings, optimizer)
        super().setup(model, None, replace(settings, precision=told.precision, compile=False))
        if told.own_precision:
            self._scaler = None  # DeepSpeed has one of its own
            self._cast = model.register_forward_pre_hook(_cast_to(told.precision), with_kwargs=True)
        if settings.fused:
            use_fused(optimizer)
        before = Remembered(model, optimizer)
        self._quiet.begin()
        self._local_rank.begin()
        self._engine = self._make_engine(model, optimizer, told)
        self._guards_loss = settings.nonfinite == "loss"
        self._plain: _PlainUpdate | None = None
        if told.stage == 0:
            guard = "gradients" if self._guards_loss else settings.nonfinite
            update = Update(optimizer, replace(settings, nonfinite=guard, gradient_clip=told.clip), self._scaler)
            self._plain = self._engine.optimizer = _PlainUpdate(update)
            self._engine.torch_autocast_z0_gradscaler = None  # the update has it
            self._parts: WholeState | DividedState = WholeState(before)
        else:
            self._parts = DividedState(before, self._engine.optimizer, self.rank, self.reduce, self._library)
            self._take_over_scaling()
        if settings.compile:
            self._engine.compile()
        engine: nn.Module = self._engine
        return engine

    def _make_engine(self, model: nn.Module, optimizer: Optimizer, told: Combined) -> Any:
        """DeepSpeed's engine over the group that is already there."""
        library = self._library
        with environment_for_a_while(LOCAL_RANK=str(self.device.index or 0)), self.watch.waiting("DeepSpeed's start"):
            library.init_distributed(self.group.backend, verbose=False, dist_init_required=_adopt(library))
            try:
                library.DeepSpeedConfig(told.json)
            except Exception as error:  # whatever its many checks raise is about what it was told
                text = " ".join(str(error).split())
                raise ConfigError(
                    f"DeepSpeed refuses its settings ({self.config.deepspeed_config or 'made from the config'}): {text}"
                ) from error
            engine = self.initialize(model, optimizer, told)
        if told.stage and engine.optimizer.optimizer is not optimizer:
            raise ConfigError(
                f"DeepSpeed puts an optimizer of its own in the place of {type(optimizer).__name__}, which would not "
                "follow the learning rate; use Adam, AdamW or SGD, or strategy.zero_stage=0"
            )
        engine.set_gradient_accumulation_boundary(True)
        return engine

    def initialize(self, model: nn.Module, optimizer: Optimizer, told: Combined) -> Any:
        """Let DeepSpeed take over model and optimizer."""
        engine, *_ = self._library.initialize(
            model=model, optimizer=optimizer, config=told.json, dist_init_required=False
        )
        return engine

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        self._engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.watch.begin(f"the gradients of step {self._steps}")
        if self._guards_loss:  # DeepSpeed looks at gradients: a loss that is not finite makes them all so
            loss = loss * torch.where(torch.isfinite(loss), 1.0, float("nan"))
        loss = loss * self.world_size  # DeepSpeed divides by it
        if self._plain is not None and self._scaler is not None:
            loss = self._scaler.scale(loss)
        try:
            self._engine.backward(loss)
        except BaseException:  # no wait any longer, whatever the user makes of it
            self.watch.end()
            raise

    def step(self, loss: Tensor) -> StepResult:
        assert self._engine is not None, "setup was called without an optimizer"
        if self._plain is not None:
            # Each rank has its part of the loss, but all must decide alike.
            self._plain.loss = self.reduce(loss) if self._scaler is not None else loss
        self._engine.step()
        result = self._plain.result if self._plain is not None else self._divided_result(loss)
        self.step_done()
        return result

    def _divided_result(self, loss: Tensor) -> StepResult:
        """What ZeRO's step did. It has waited for the norm of the gradients, so that reading flags costs nothing."""
        overflowed = bool(self._engine.optimizer.overflow)
        norm = None
        if self._told.clip is not None:
            norm = torch.as_tensor(self._engine.get_global_grad_norm(), dtype=torch.float32)
        skipped = overflowed
        if self._scaler is not None:
            scale = self._adjust_scale(overflowed)
            # Overflows while the scale is looked for are normal work; below 1 there is nothing left to find.
            skipped = overflowed and (scale < 1 or not bool(torch.isfinite(self.reduce(loss))))
        return StepResult(norm, skipped)

    def _take_over_scaling(self) -> None:
        """Scale fp16 losses by torch's rule, as on one device.

        Left to itself, ZeRO with autocast keeps a scale that overflows, and clips by a norm that is still scaled.
        """
        self._engine.optimizer.torch_autocast_gradscaler = None  # it makes one even after another model's fp16
        if self._scaler is not None:
            self._engine.optimizer.override_loss_scale(self._scaler.get_scale())

    def _adjust_scale(self, overflowed: bool) -> float:
        """The scale of the step that was; the next step has a smaller one after an overflow, a larger one after many
        good steps."""
        assert self._scaler is not None
        state = self._scaler.state_dict()
        used = float(state["scale"])
        state["_growth_tracker"] = 0 if overflowed else state["_growth_tracker"] + 1
        if overflowed:
            state["scale"] *= state["backoff_factor"]
        elif state["_growth_tracker"] == state["growth_interval"]:
            state["scale"] *= state["growth_factor"]
            state["_growth_tracker"] = 0
        self._scaler.load_state_dict(state)
        self._engine.optimizer.override_loss_scale(state["scale"])
        return used

    def state(self) -> dict[str, Any]:
        if self._engine is None:
            return super().state()
        state: dict[str, Any] = {"model": self._parts.weights(), "optimizer": self._parts.optimizer()}
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        elif self._told.own_precision and self._told.precision == "fp16":
            state["deepspeed_scaler"] = dict(vars(self._engine.optimizer.loss_scaler))
            state["deepspeed_scaler"].pop("dtype", None)
        return state if self.rank == 0 else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        if self._engine is None:
            super().load_state(state)
            return
        self._parts.load_weights(state["model"])
        if "optimizer" in state:
            self._parts.load_optimizer(state["optimizer"])
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(dict(state["scaler"]))
            if self._plain is None:
                self._take_over_scaling()
        if self._told.own_precision and "deepspeed_scaler" in state:
            vars(self._engine.optimizer.loss_scaler).update(state["deepspeed_scaler"])

    def teardown(self) -> None:
        self._release()
        if self.group.is_own and torch.distributed.is_initialized() and self._library.comm.is_initialized():
            self._library.comm.destroy_process_group()  # with the groups that DeepSpeed made of it and keeps
        super().teardown()

    def _release(self) -> None:
        """Let go of a model: hooks, buffers, filters."""
        self._quiet.end()
        self._local_rank.end()
        if self._cast is not None:
            self._cast.remove()
            self._cast = None
        if self._engine is not None:
            if torch.distributed.is_initialized():  # not after the group was closed: it asks for its rank
                self._engine.destroy()
            self._engine = None


class _LocalRank:
    """LOCAL_RANK, which DeepSpeed also looks up in the middle of a training and only some launchers set."""

    _users = 0

    def __init__(self, number: str) -> None:
        self._number, self._used = number, False

    def begin(self) -> None:
        """From now on, as long as any engine needs it."""
        if _LocalRank._users or "LOCAL_RANK" not in os.environ:
            os.environ["LOCAL_RANK"] = self._number
            _LocalRank._users += 1
            self._used = True

    def end(self) -> None:
        """No longer. Safe to call twice."""
        if self._used:
            self._used = False
            _LocalRank._users -= 1
            if not _LocalRank._users:
                os.environ.pop("LOCAL_RANK", None)


class _PlainUpdate:
    """Stands where the engine expects an optimizer. In stage 0 DeepSpeed only sums gradients; its own step neither
    looks whether they are finite nor tells their norm."""

    overflow = False

    def __init__(self, update: Update) -> None:
        self._update = update
        self.loss = torch.zeros(())
        self.result = StepResult(None, False)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Where the engine looks for the learning rate."""
        return self._update.optimizer.param_groups

    def step(self) -> None:
        """Update the weights, and keep what happened."""
        self.result = self._update(self.loss)


class _Quiet:
    """Keeps DeepSpeed from saying what the framework knows, and torch from saying what is up to DeepSpeed."""

    _SAID = ("untested ZeRO Optimizer", "untested optimizer", "OVERFLOW! Skipping step")

    def __init__(self) -> None:
        self._filter: Any = None

    def begin(self) -> None:
        """From now on."""
        deprecated = r"`torch\.distributed\.\w+` is deprecated"
        warnings.filterwarnings("ignore", deprecated, FutureWarning)
        self._filter = warnings.filters[0]
        logging.getLogger("DeepSpeed").addFilter(self._worth_saying)

    def end(self) -> None:
        """No longer. Safe to call twice."""
        logging.getLogger("DeepSpeed").removeFilter(self._worth_saying)
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        self._filter = None

    def _worth_saying(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not any(said in text for said in self._SAID)


def import_deepspeed(device: torch.device) -> Any:
    """The library, for this kind of device: it looks for one when it is first imported."""
    variables = {"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {}
    with environment_for_a_while(**variables):
        library = require("deepspeed", "deepspeed", "strategy=deepspeed")
        chosen = library.accelerator.get_accelerator().device_name()
    if chosen != device.type:
        raise ConfigError(
            f"DeepSpeed was imported before for {chosen}, but this training runs on {device}; start it in a new "
            f"process, or set DS_ACCELERATOR={device.type} in the environment"
        )
    return library


def _check_dimensions(model: nn.Module) -> None:
    """DeepSpeed sends parameters as rows of bytes, which a single number is not."""
    without = [name for name, p in model.named_parameters() if p.ndim == 0]
    if without:
        raise ModelError(
            f"DeepSpeed cannot send a parameter without dimensions, and {without[0]} is one; give it the shape (1,)"
        )


def _adopt(library: Any) -> bool | None:
    """What `init_distributed` is to be told, so that it takes torch's group as it is."""
    # Shared-memory sums for inference: nothing here uses them, and they would be compiled at the first start.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return False if library.comm.is_initialized() else None


def _cast_to(precision: str) -> Any:
    """A hook that brings inputs to the type in which DeepSpeed keeps the model."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() else value
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(cast(v) for v in value)
        return {k: cast(v) for k, v in value.items()} if isinstance(value, dict) else value

    return lambda module, args, kwargs: (cast(args), cast(kwargs))
