"""What the ranks of a training must agree on before it begins."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from distributed_training._version import __version__
from distributed_training.checkpoint.tree import put_together, take_apart
from distributed_training.config import Config
from distributed_training.runtime.errors import RanksError
from distributed_training.runtime.world import named
from distributed_training.strategies.base import Strategy

# Where data lies and how it is read may differ from machine to machine; what is trained may not.
_SECTIONS = ("model", "training", "data", "strategy", "checkpoint", "early_stopping")
_OWN = (
    "training.device",
    "data.root",
    "data.num_workers",
    "data.pin_memory",
    "data.resident",
    "checkpoint.resume",
    "model.weights",
)


def check_same_everywhere(strategy: Strategy, config: Config, model: nn.Module, source: Mapping[str, Any]) -> None:
    """Refuse ranks with other settings, other code or other data, naming the ranks and the difference."""
    if strategy.world_size == 1:
        return
    settings = config.to_dict()
    own = {
        "distributed_training": __version__,
        "torch": torch.__version__.split("+")[0],
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "the source of the model's class": _source_hash(model),
        **{key: value for key, value in _flat({s: settings[s] for s in _SECTIONS}) if key not in _OWN},
        **{f"data: {key}": value for key, value in source.items()},
    }
    advice = "Start all ranks with the same config, code and data (docs/troubleshooting.md#ranks-differ)"
    refuse_differences(strategy, own, "", advice)


def refuse_differences(strategy: Strategy, own: Mapping[str, Any], where: str, advice: str) -> None:
    """Compare facts of all ranks. Where they differ, all of them raise the same error, which says who has what."""
    everyone = strategy.gather_values({key: repr(value) for key, value in own.items()})
    keys = {key: None for facts in everyone for key in facts}
    differing = [key for key in keys if len({facts.get(key) for facts in everyone}) > 1]
    if differing:
        shown = "; ".join(_who_has_what(key, [facts.get(key) for facts in everyone]) for key in differing[:3])
        more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise RanksError(f"{where}the ranks differ: {shown}{more}. {advice}")


def _who_has_what(key: str, values: list[str | None]) -> str:
    """`training.lr is 0.1 on ranks 0, 2 and 0.2 on rank 1`."""
    ranks: dict[str | None, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    parts = [f"{'missing' if value is None else value} on {named(some)}" for value, some in ranks.items()]
    return f"{key} is {' and '.join(parts[:4])}"


def from_rank_0(strategy: Strategy, state: Any) -> Any:
    """Rank 0's state on every rank, tensor by tensor: only its machine needs to have the file."""
    if strategy.world_size == 1:
        return state
    description, tensors = take_apart(state)
    facts = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
    description, facts = strategy.gather_values([description, facts] if strategy.rank == 0 else None)[0]
    received = {}
    for name, (dtype, shape) in facts.items():
        own = tensors[name] if strategy.rank == 0 else torch.empty(shape, dtype=getattr(torch, dtype))
        received[name] = strategy.broadcast(own.to(strategy.device).contiguous()).to("cpu")
    return put_together(description, received)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _source_hash(model: nn.Module) -> str:
    try:
        return hashlib.blake2b(inspect.getsource(type(model)).encode(), digest_size=6).hexdigest()
    except (OSError, TypeError):  # typed into a shell
        return ""
