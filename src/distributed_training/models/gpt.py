"""A small decoder-only transformer for next-token prediction, in the manner of GPT-2."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed_training.config import ModelConfig
from distributed_training.config.check import between, positive
from distributed_training.models.base import Arguments, CheckpointedModule, Shape, read_args
from distributed_training.runtime.errors import ConfigError, ModelError


@dataclass(kw_only=True)
class GPTArguments(Arguments):
    """`model.args` of gpt."""

    vocab_size: int = 256
    """Number of tokens; 256 are the bytes."""
    context: int = 128
    """Longest sequence, in tokens."""
    layers: int = 4
    """Transformer blocks."""
    heads: int = 4
    """Attention heads of each block."""
    width: int = 128
    """Numbers that stand for a token; a multiple of `heads`."""
    dropout: float = 0.0
    """Share of activations dropped."""

    def check(self) -> None:
        """Refuse empty models and heads of unequal width."""
        for key in ("vocab_size", "context", "layers", "heads", "width"):
            positive(f"model.args.{key}", getattr(self, key))
        between("model.args.dropout", self.dropout, 0, 1)
        if self.width % self.heads:
            raise ConfigError(f"model.args.width={self.width} must be a multiple of model.args.heads={self.heads}")


class Attention(nn.Module):
    """Each token looks at itself and those before it."""

    def __init__(self, args: GPTArguments) -> None:
        super().__init__()
        self.heads, self.dropout = args.heads, args.dropout
        self.qkv = nn.Linear(args.width, 3 * args.width)
        self.projection = nn.Linear(args.width, args.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same; `mask` is None or (batch, 1, tokens, tokens), causality included."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)
        projected: Tensor = self.projection(out.transpose(1, 2).flatten(2))
        return projected


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to what came in."""

    def __init__(self, args: GPTArguments) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(args.width)
        self.attention = Attention(args)
        self.norm2 = nn.LayerNorm(args.width)
        self.widen = nn.Linear(args.width, 4 * args.width)
        self.projection = nn.Linear(4 * args.width, args.width)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """(batch, tokens, width) to the same."""
        x = x + self.dropout(self.attention(self.norm1(x), mask))
        return x + self.dropout(self.projection(F.gelu(self.widen(self.norm2(x)), approximate="tanh")))


class GPT(CheckpointedModule):
    """Embeddings, transformer blocks, and logits from the token embedding itself (tied weights)."""

    loss_type = "ForCausalLM"  # as transformers names it: labels are shifted by one, -100 is not judged

    def __init__(self, args: GPTArguments) -> None:
        super().__init__()
        self.context = args.context
        self.token_embedding = nn.Embedding(args.vocab_size, args.width)
        self.position_embedding = nn.Embedding(args.context, args.width)
        self.dropout = nn.Dropout(args.dropout)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width)
        self._initialise(args.layers)

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Two projections per block add to the residual stream; scaled so that its variance does not grow.
                residual = name.endswith("projection.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """Logits (batch, tokens, vocabulary); with `labels` (usually the same ids), a dict of loss and logits.

        Labels are shifted here, as Hugging Face does: position t is judged by label t + 1, and -100 is not judged.
        `attention_mask` is 1 for tokens and 0 for padding.
        """
        tokens = input_ids.shape[1]
        if tokens > self.context:
            raise ModelError(
                f"gpt got a sequence of {tokens} tokens but model.args.context={self.context}; "
                "raise it or cut the sequences"
            )
        positions = torch.arange(tokens, device=input_ids.device)
        x = self.dropout(self.token_embedding(input_ids) + self.position_embedding(positions))
        mask = None if attention_mask is None else _causal_mask(attention_mask)
        for block in self.blocks:
            x = self.run_block(block, x, mask)
        # The embedding serves as the output layer too, without a second name that a checkpoint would have to untie.
        logits = F.linear(self.norm(x), self.token_embedding.weight)
        if labels is None:
            return logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def _causal_mask(attention_mask: Tensor) -> Tensor:
    """Which token may look at which, padding left out. Padding sees itself: attending to nothing would give NaN."""
    tokens = attention_mask.shape[1]
    square = torch.ones(tokens, tokens, dtype=torch.bool, device=attention_mask.device)
    visible = attention_mask.bool()[:, None, None, :] & square.tril()
    return visible | torch.eye(tokens, dtype=torch.bool, device=attention_mask.device)


def build(config: ModelConfig, input_shape: Shape | None) -> GPT:
    """A gpt from the config. Its number of outputs is `vocab_size`; the shape of a sample does not matter."""
    return GPT(read_args(GPTArguments, config))
