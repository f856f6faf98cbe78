"""What all named models share: reading `model.args`, and recomputing activations to save memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from distributed_training.config import ModelConfig
from distributed_training.config.check import check_types, did_you_mean
from distributed_training.runtime.errors import ConfigError, ModelError

Shape = Sequence[int]
"""Shape of one sample, without the batch dimension."""


@dataclasses.dataclass(kw_only=True)
class Arguments:
    """Base of the settings a model takes from `model.args`; types are checked on creation."""

    def __post_init__(self) -> None:
        check_types(self, "model.args")
        self.check()

    def check(self) -> None:
        """Refuse values that no model can have."""


A = TypeVar("A", bound=Arguments)


def read_args(cls: type[A], config: ModelConfig) -> A:
    """`model.args` as a model's own settings. An unknown key is an error that names the nearest known one."""
    known = [f.name for f in dataclasses.fields(cls)]
    for key in config.args:
        if key not in known:
            hint = did_you_mean(str(key), known) or f"; there are {', '.join(known)}"
            raise ConfigError(f"unknown setting model.args.{key} of {config.name}{hint}")
    return cls(**config.args)


def require_num_classes(config: ModelConfig) -> int:
    """The number of outputs, for models that cannot do without."""
    if config.num_classes is None:
        raise ModelError(f"{config.name} needs model.num_classes: it is not set and the dataset does not tell")
    return config.num_classes


class CheckpointedModule(nn.Module):
    """A model made of blocks whose activations can be recomputed in the backward pass instead of kept."""

    head_name: str | None = None
    """Name of the submodule that maps features to classes; pretrained weights may have another one."""
    gradient_checkpointing = False

    def gradient_checkpointing_enable(self) -> None:
        """From now on, trade time for memory while training: the gradients stay the same."""
        self.gradient_checkpointing = True

    def run_block(self, block: Callable[..., Any], *inputs: Any) -> Any:
        """The block's output; its activations are kept only if gradient checkpointing is off."""
        if not (self.gradient_checkpointing and self.training):
            return block(*inputs)
        if torch.compiler.is_compiling():  # the compiler recomputes without side effects, and takes no contexts
            return checkpoint(block, *inputs, use_reentrant=False)
        return checkpoint(
            block,
            *inputs,
            use_reentrant=False,
            context_fn=lambda: (contextlib.nullcontext(), statistics_kept(block)),
        )


@contextlib.contextmanager
def statistics_kept(block: Any) -> Iterator[None]:
    """Let batch norms update copies of their statistics: recomputing a block must not count its batch twice."""
    kept = []
    for module in block.modules() if isinstance(block, nn.Module) else ():
        if isinstance(module, _BatchNorm):
            buffers = {name: b for name, b in module._buffers.items() if b is not None}
            kept.append((module, buffers))
            module._buffers.update({name: b.clone() for name, b in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in kept:
            module._buffers.update(buffers)
