"""The record of a training: loss, samples and weights of every step, or how far the weights are from another record.

FOLDER/facts.json                 strategy, ranks, data, what the model has that matters to a comparison
FOLDER/steps.jsonl                a line a step: loss, hash of the samples, differences by tensor
FOLDER/weights/000020.safetensors the weights after 20 steps; only where there is nothing to compare with
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from distributed_training.config import Config
from distributed_training.runtime.errors import RunDirectoryError
from distributed_training.training.agreement import from_rank_0
from distributed_training.training.callbacks import Callback
from distributed_training.training.difference import differences, typical_size
from distributed_training.training.ledger import hash_of

if TYPE_CHECKING:
    from distributed_training.training.trainer import Trainer

FACTS, STEPS, WEIGHTS = "facts.json", "steps.jsonl", "weights"


class Recorder(Callback):
    """Writes the record that `record.folder` asks for. Every rank has one, as gathering weights takes all of them."""

    def __init__(self, config: Config, data: Mapping[str, Any]) -> None:
        assert config.record.folder is not None
        self._folder, self._config, self._data = Path(config.record.folder), config, data
        self._against = Path(config.record.against) / WEIGHTS if config.record.against is not None else None

    def on_train_start(self, trainer: Trainer) -> None:
        if trainer.strategy.rank == 0:
            self._begin(trainer)
        if self._config.record.nudge:
            weights = from_rank_0(trainer.strategy, trainer.strategy.state()["model"])
            trainer.strategy.load_state({"model": nudged(weights)})
        self._record(trainer, {})

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        batch, total = trainer.engine.batch, float(trainer.strategy.reduce(loss.float()))
        assert batch is not None
        ids = batch.ids if batch.step_ids is None else batch.step_ids
        # JSON has no word for infinity and NaN.
        said = total if math.isfinite(total) else str(total)
        self._record(trainer, {"loss": said, "ids": hash_of(ids), "random": _drew_random_numbers(trainer.device)})

    def _begin(self, trainer: Trainer) -> None:
        if (self._folder / STEPS).exists():
            raise RunDirectoryError(
                f"record.folder={self._folder} holds a record already; give an empty folder, and record one training "
                "a program"
            )
        (self._folder / WEIGHTS if self._against is None else self._folder).mkdir(parents=True, exist_ok=True)
        batchnorm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in trainer.model.modules())
        facts = {
            "strategy": trainer.strategy.name,
            "ranks": trainer.strategy.world_size,
            "exact": trainer.strategy.exact,
            "device": trainer.device.type,
            "precision": self._config.training.precision,
            "batchnorm": batchnorm,
            "sync_batchnorm": self._config.strategy.sync_batchnorm,
            "data": dict(self._data),
        }
        (self._folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def _record(self, trainer: Trainer, line: dict[str, Any]) -> None:
        state = trainer.strategy.state()  # all ranks have a part in it
        if trainer.strategy.rank != 0:
            return
        number, weights = trainer.cursor.global_step, state["model"]
        if self._against is None:
            typical = typical_size(weights, [name for name, _ in trainer.model.named_parameters()])
            write_weights(self._folder / WEIGHTS, number, weights, typical)
        elif (other := read_weights(self._against, number)) is not None:
            apart = differences(other[0], weights, other[1])
            line["weights"] = {name: value if math.isfinite(value) else str(value) for name, value in apart.items()}
        with (self._folder / STEPS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": number, **line}) + "\n")


def write_weights(folder: Path, step: int, weights: Mapping[str, Tensor], typical: float) -> None:
    """Weights after a step, and their typical size."""
    # Copies: the file format does not know tensors that share memory.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    save_file(tensors, folder / f"{step:06}.safetensors", metadata={"typical": repr(typical)})


def read_weights(folder: Path, step: int) -> tuple[dict[str, Tensor], float] | None:
    """(weights after a step, their typical size); None if the record does not go that far."""
    path = folder / f"{step:06}.safetensors"
    if not path.is_file():
        return None
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, float(file.metadata()["typical"])  # noqa: SIM118


def nudged(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every weight changed by up to one unit in its last place, at random but always the same."""
    generator = torch.Generator().manual_seed(0)

    def nudge(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        share = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return (tensor.cpu().double() * (1 + share * torch.finfo(tensor.dtype).eps)).to(tensor.dtype)

    return {name: nudge(tensor) for name, tensor in weights.items()}


def _drew_random_numbers(device: torch.device) -> bool:
    """Whether the step that just ended used randomness, as dropout does: it began with freshly seeded generators."""
    if device.type == "cuda" and torch.cuda.default_generators[torch.cuda.current_device()].get_offset() > 0:
        return True
    fresh = torch.Generator().manual_seed(torch.initial_seed())
    return not torch.equal(fresh.get_state(), torch.get_rng_state())
