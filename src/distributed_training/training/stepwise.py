"""`create_distributed_trainer`: a training loop of your own, whose steps run on all ranks and GPUs.

The step itself is that of `Trainer`: `TrainStep` under a strategy. What is added is what a loop of one's own needs: the
batch is cut by the trainer, criterion and optimizer come with every step, and the loss goes back as a number.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed_training.checkpoint import CheckpointStore, find_checkpoint, read_state
from distributed_training.config import Config
from distributed_training.config.load import config_from_environment
from distributed_training.data.base import Batch, Share
from distributed_training.data.nested import batch_length, map_tensors, tensors_in
from distributed_training.runtime.device import choose_devices
from distributed_training.runtime.errors import CheckpointError, ConfigError, DataError
from distributed_training.runtime.process import prepare_process
from distributed_training.runtime.world import read_world
from distributed_training.strategies import Place, Strategy, make_strategy
from distributed_training.training.activations import enable_gradient_checkpointing
from distributed_training.training.agreement import from_rank_0, refuse_differences
from distributed_training.training.criteria import Criteria, Reduction, criterion_name
from distributed_training.training.evaluation import evaluating, gather_rows
from distributed_training.training.forms import Criterion
from distributed_training.training.guard import NonfiniteGuard
from distributed_training.training.kept_optimizer import KeptOptimizer
from distributed_training.training.step import TrainStep
from distributed_training.training.step_engine import StepEngine

logger = logging.getLogger(__name__)

_SAME_BATCH = (
    "Every process must pass the same global batch, which the trainer divides: seed all of them alike, and leave out "
    "samplers that divide the data (docs/stepwise.md#the-batch)"
)


class Evaluation(NamedTuple):
    """What `evaluate_step` gives."""

    loss: float
    """The loss of the whole batch."""
    outputs: Any
    """The model's outputs for the whole batch, in its order, where the inputs were."""


def create_distributed_trainer(
    model: nn.Module,
    *,
    num_gpus: int | None = None,
    strategy: str = "auto",
    gradient_accumulation_steps: int = 1,
    scale_learning_rate: bool = False,
    check_batches: int | bool = 3,
    reduction: Reduction = "auto",
    config: Config | None = None,
) -> DistributedTrainer:
    """A trainer whose every step you call yourself, on as many processes and GPUs as there are.

        trainer = create_distributed_trainer(model)
        loss = trainer.train_step(inputs, targets, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()))

    Run plainly it uses this process's devices; under mpirun, torchrun or `dtrain launch`, all ranks together.

    Args:
        model: any module. It is moved to the device at once; rank 0's weights are those that all start from.
        num_gpus: GPUs of each process. Left out: one under a launcher, otherwise all. Without GPUs the CPU is used.
        strategy: mpi, ddp, zero1, ...; auto: what fits the launcher.
        gradient_accumulation_steps: every so many calls of `train_step` update the weights, with their mean gradient.
        scale_learning_rate: multiply the optimizer's learning rate by the number of devices.
        check_batches: compare the batches of all ranks in so many first steps; True: in every step.
        reduction: what criteria that are not torch's own do: mean, sum, or auto to find out.
        config: precision, clipping, seed, deadline and all else; left out, fp32 and the defaults.
    """
    if config is None:
        config = config_from_environment({"training": {"precision": "fp32"}}, "create_distributed_trainer")
    if strategy != "auto":
        config = config.replace(**{"strategy.name": strategy})
    if gradient_accumulation_steps < 1:
        raise ConfigError(f"gradient_accumulation_steps={gradient_accumulation_steps}: at least 1")
    world = read_world()
    device, gpus = choose_devices(config.training.device, num_gpus, world)
    prepare_process(config, device)
    place = Place(
        device,
        world,
        config.chosen_strategy(),
        config.run.deadline,
        gradient_accumulation=gradient_accumulation_steps,
        gpus=gpus,
    )
    joined = make_strategy(place)
    if num_gpus is not None and len(gpus) > 1 and not joined.divides_among_gpus:
        joined.teardown()
        raise ConfigError(
            f"strategy={joined.name} uses one GPU in each process, but num_gpus={num_gpus}: "
            "start a process for each GPU, or use strategy=ddp"
        )
    devices = world.size * (max(len(gpus), 1) if joined.divides_among_gpus else 1)
    checks = float("inf") if check_batches is True else int(check_batches)
    return DistributedTrainer(
        model,
        joined,
        config,
        criteria=Criteria(joined, reduction, config.training.gradient_accumulation),
        accumulates=gradient_accumulation_steps,
        rate_factor=float(devices) if scale_learning_rate else 1.0,
        checks=checks,
        gpus=gpus,
    )


class DistributedTrainer:
    """Runs single steps over the whole world. All ranks call the same methods in the same order.

    Made by `create_distributed_trainer`. `steps` counts updates of the weights, `rank` and `world_size` say which
    process this is, `strategy` and `device` what it runs on.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        config: Config,
        *,
        criteria: Criteria,
        accumulates: int,
        rate_factor: float,
        checks: float,
        gpus: tuple[int, ...],
    ) -> None:
        self.model, self.strategy, self.config = model.to(strategy.device), strategy, config
        self.device, self.rank, self.world_size = strategy.device, strategy.rank, strategy.world_size
        self.steps = 0
        """Updates of the weights so far."""
        self._criteria, self._accumulates, self._rate_factor = criteria, accumulates, rate_factor
        self._share = Share(self.rank, self.world_size)
        self._checks = {"train_step": checks, "evaluate_step": checks}
        self._random_devices = list(gpus) or ([self.device.index or 0] if self.device.type == "cuda" else [])
        self._guard = NonfiniteGuard(config.training.max_nonfinite_steps, self.device, speaks=self.rank == 0)
        self._engine: StepEngine | None = None
        self._step: TrainStep | None = None
        self._kept: KeptOptimizer | None = None
        self._loaded: dict[str, Any] | None = None
        self._calls = self._accumulated = 0
        self._pending = torch.zeros((), device=self.device)
        if config.training.gradient_checkpointing:
            enable_gradient_checkpointing(model)

    def train_step(self, inputs: Any, targets: Any, criterion: Criterion, optimizer: Optimizer) -> float:
        """One step over a global batch: forward, backward, and the update where it is due. Gives the batch's loss.

        Args:
            inputs: a tensor, or a tuple or dict of them, which become the model's arguments; the same on all ranks.
            targets: a tensor or a nesting of them, with as many rows.
            criterion: `criterion(output, targets)`, one number.
            optimizer: over `model.parameters()`. One made anew is taken for the first, whose state is kept.
        """
        step, kept = self._ready(optimizer)
        batch = self._divided(inputs, targets)
        self._compare("train_step", batch, inputs, targets, criterion)
        self.engine.loss = self._criteria.part_loss(criterion, targets, batch.step_size)
        last = self._accumulated + 1 >= self._accumulates
        with self._own_randomness():
            loss = step.gradients(batch, 0, self._calls, share=1 / self._accumulates, last=last)
        self._calls += 1
        self._accumulated += 1
        self._pending = self._pending + loss
        if last:
            with kept.scaled(self._rate_factor):
                result = self.strategy.step(self._pending)
            self._guard.update(result, batch, 0, self.steps)
            self.steps += 1
            self._forget_gradients()
        value = self._over_ranks(loss, batch)
        self._guard.check()
        return value

    def evaluate_step(self, inputs: Any, targets: Any, criterion: Criterion) -> Evaluation:
        """Loss and outputs of a global batch without gradients, the model in its evaluation mode meanwhile."""
        engine = self.engine
        batch = self._divided(inputs, targets)
        self._compare("evaluate_step", batch, inputs, targets, criterion)
        engine.loss = self._criteria.part_loss(criterion, targets, batch.step_size)
        with self._own_randomness(), evaluating(engine.model), engine.autocast:
            answer = engine.answer(engine.place(batch))
        assert answer.loss is not None
        share = batch.size / batch.step_size
        loss = self._over_ranks(answer.loss * share if share else torch.zeros_like(answer.loss), batch)
        outputs = gather_rows(self.strategy, answer.output, batch) if self.world_size > 1 else answer.output
        home = next(tensors_in(inputs)).device
        return Evaluation(loss, map_tensors(lambda t: t.to(home), outputs))

    def save(self, path: str | Path) -> Path:
        """Write weights and optimizer state as a checkpoint into a folder, which keeps the newest few; its path.

        All ranks call it, rank 0 writes. Gradients that wait for an update are not part of a checkpoint.
        """
        if self._accumulated and self.rank == 0:
            logger.warning(
                "saved after %d of %d batches of an update: their gradients are not in the checkpoint",
                self._accumulated,
                self._accumulates,
            )
        state = {**self.engine.strategy.state(), "stepwise": {"steps": self.steps, "calls": self._calls}}
        if self._loaded is not None and self._kept is None:
            state = {**self._loaded, **state}
        return Path(self._by_rank_0(lambda: str(self._write(Path(path), state))))

    def load(self, path: str | Path) -> Path:
        """Take weights and optimizer state from a checkpoint, or from the newest in a folder; gives its path.

        All ranks call it, only rank 0 needs the file. Before the first `train_step` the optimizer state waits for
        its optimizer. Learning rates and other settings are those of the optimizer that is passed, not the saved.
        """
        state: dict[str, Any] = {}

        def read() -> str:
            found = find_checkpoint(Path(path))
            saved = read_state(found.path)
            state.update({key: saved[key] for key in ("model", "optimizer", "scaler") if key in saved})
            state["stepwise"] = saved.get("stepwise", {"steps": found.step, "calls": found.step})
            return str(found.path)

        engine = self.engine
        found = self._by_rank_0(read)
        state = from_rank_0(self.strategy, state)
        self._forget_gradients()
        self.model.zero_grad(set_to_none=True)
        place = state.pop("stepwise")
        self.steps, self._calls = int(place["steps"]), int(place["calls"])
        if self._kept is None:
            engine.strategy.load_state({"model": state["model"]})
            self._loaded = state
        else:
            self._load_all(state, self._kept)
        return Path(found)

    def close(self) -> None:
        """Leave the other ranks and give back process-wide settings. Safe to call twice."""
        self.strategy.teardown()

    def __enter__(self) -> DistributedTrainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def engine(self) -> StepEngine:
        """The model under its strategy; until the first `train_step` without an optimizer."""
        if self._engine is None:
            self._engine = StepEngine(self.model, None, self.strategy, self.config)
        return self._engine

    def _ready(self, optimizer: Any) -> tuple[TrainStep, KeptOptimizer]:
        """Set the model up with the optimizer of the first step; recognise those of later ones."""
        if self._kept is not None and self._step is not None:
            self._kept.recognise(optimizer)
            return self._step, self._kept
        kept = KeptOptimizer(self.model, optimizer)
        before = [id(p) for p in self.model.parameters()]
        self._engine = StepEngine(self.model, optimizer, self.strategy, self.config)
        if [id(p) for p in self.model.parameters()] != before:
            raise ConfigError(
                f"strategy={self.strategy.name} puts parameters of its own into the model, which an optimizer made by "
                "you does not know; use ddp, mpi or zero1 here, or `Trainer`, which has no such limit"
            )
        training = self.config.training
        self._step = TrainStep(self._engine, training.gradient_accumulation, training.seed)
        self._kept = kept
        if self._loaded is not None:
            self._load_all(self._loaded, kept)
            self._loaded = None
        return self._step, kept

    def _load_all(self, state: Mapping[str, Any], kept: KeptOptimizer) -> None:
        if "optimizer" in state:
            state = {**state, "optimizer": kept.with_own_settings(state["optimizer"])}
        self.strategy.load_state(state)

    def _forget_gradients(self) -> None:
        self._accumulated, self._pending = 0, torch.zeros((), device=self.device)

    def _divided(self, inputs: Any, targets: Any) -> Batch:
        """This rank's rows of a global batch."""
        rows = _rows(inputs, targets)
        ids = np.arange(rows)
        if self.world_size == 1:
            return Batch(ids, (inputs, targets))
        own = self._share.rows(rows)
        data = map_tensors(lambda t: t[own] if t.ndim and len(t) == rows else t, (inputs, targets))
        return self._share.batch(ids, data)

    def _compare(self, call: str, batch: Batch, inputs: Any, targets: Any, criterion: Any) -> None:
        """Refuse ranks with other batches, as long as they are to be compared."""
        if self.world_size == 1 or self._checks[call] <= 0:
            return
        self._checks[call] -= 1
        facts = {
            "samples": batch.step_size,
            "shapes of inputs and targets": [list(t.shape) for t in tensors_in((inputs, targets))],
            "hash of inputs": _hash(inputs),
            "hash of targets": _hash(targets),
            "criterion": criterion_name(criterion),
        }
        where = f"{call} {self._calls}: " if call == "train_step" else f"{call}: "
        refuse_differences(self.strategy, facts, where, _SAME_BATCH)

    def _over_ranks(self, loss: Tensor, batch: Batch) -> float:
        """The sum of the ranks' losses. Their batch sizes travel along: a difference would go unnoticed otherwise."""
        if self.world_size == 1:
            return float(loss)
        rows = batch.step_size
        own = torch.tensor([0.0, rows, rows * rows], dtype=torch.float64)
        own = own.to(self.device)
        own[0] = loss.detach()
        with self.strategy.waiting("the loss of all ranks"):
            value, sizes, squares = self.strategy.reduce(own).tolist()
        if squares * self.world_size != sizes * sizes:
            refuse_differences(self.strategy, {"samples": rows}, "the batch: ", _SAME_BATCH)
        return float(value)

    def _write(self, folder: Path, state: dict[str, Any]) -> Path:
        config = replace(self.config.checkpoint, background=False, keep_best=False)
        store = CheckpointStore(folder, config, self.config.run.deadline)
        later = [info.step for info in store.all() if info.step > self.steps]
        if later:
            raise CheckpointError(
                f"{folder}: there is a checkpoint of step {max(later)}, and this training is at step {self.steps}: "
                "load it to go on from there, or save into another folder"
            )
        store.save(state, step=self.steps, epoch=0, metrics={})
        return store.committed()[-1].path

    def _by_rank_0(self, work: Any) -> str:
        """What rank 0's work gave, on every rank; where it failed, all ranks raise the same error."""
        done: dict[str, str] | None = None
        if self.rank == 0:
            try:
                done = {"result": work()}
            except CheckpointError as error:
                done = {"error": str(error)}
        answer = self.strategy.gather_values(done)[0]
        if "error" in answer:
            raise CheckpointError(answer["error"])
        return str(answer["result"])

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Leave torch's generators as they are: ranks that draw their batches from them must go on drawing alike."""
        with torch.random.fork_rng(self._random_devices, device_type="cuda"):
            yield


def _rows(inputs: Any, targets: Any) -> int:
    """Samples of a batch: the rows of the first tensor of the inputs, which the targets must have as well."""
    if not any(t.ndim for t in tensors_in(inputs)):
        raise DataError(f"inputs hold no tensor with rows ({type(inputs).__name__}); give torch tensors")
    rows = batch_length(inputs)
    if rows == 0:
        raise DataError("the batch is empty: inputs have no rows")
    if isinstance(targets, Tensor) and targets.ndim and len(targets) != rows:
        raise DataError(f"the batch has {rows} rows of inputs, but {len(targets)} of targets")
    return rows


def _hash(data: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors_in(data):
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
