"""A plain multi-layer perceptron: the smallest model that learns something."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from torch import Tensor, nn

from distributed_training.config import ModelConfig
from distributed_training.config.check import between, positive
from distributed_training.models.base import Arguments, CheckpointedModule, Shape, read_args, require_num_classes
from distributed_training.runtime.errors import ModelError


@dataclass(kw_only=True)
class MLPArguments(Arguments):
    """`model.args` of mlp."""

    hidden: list[int] = field(default_factory=lambda: [256, 256])
    """Width of each hidden layer."""
    dropout: float = 0.0
    """Share of activations dropped after each hidden layer."""
    in_features: int | None = None
    """Numbers in one sample. Left out, it is read from the dataset."""

    def check(self) -> None:
        """Refuse empty layers."""
        for width in self.hidden:
            positive("model.args.hidden", width)
        between("model.args.dropout", self.dropout, 0, 1)
        positive("model.args.in_features", self.in_features)


class MLP(CheckpointedModule):
    """Linear layers with ReLU between them; each sample is flattened first."""

    head_name = "head"

    def __init__(self, in_features: int, num_classes: int, hidden: list[int], dropout: float) -> None:
        super().__init__()
        widths = [in_features, *hidden]
        self.blocks = nn.Sequential(*(_block(i, o, dropout) for i, o in itertools.pairwise(widths)))
        self.head = nn.Linear(widths[-1], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes)."""
        x = x.flatten(1)
        for block in self.blocks:
            x = self.run_block(block, x)
        logits: Tensor = self.head(x)
        return logits


def _block(in_features: int, out_features: int, dropout: float) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(in_features, out_features), nn.ReLU()]
    if dropout:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def build(config: ModelConfig, input_shape: Shape | None) -> MLP:
    """An mlp from the config."""
    args = read_args(MLPArguments, config)
    if args.in_features is None and input_shape is None:
        raise ModelError("mlp needs model.args.in_features: the shape of a sample is not known from the dataset")
    in_features = args.in_features or math.prod(input_shape or ())
    return MLP(in_features, require_num_classes(config), args.hidden, args.dropout)
