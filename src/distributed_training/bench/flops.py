"""How much of a GPU a training uses: the arithmetic of a step, and what the GPU could do at most.

Model FLOP/s utilisation (MFU) as in the PaLM paper (appendix B): a training step of a decoder takes 6 N FLOP a token
for its N parameters that multiply (2 forward, 4 backward), and 12 L H Q T for attention over T tokens, where L layers
have H heads of Q numbers each. The embedding of positions adds nothing; that of tokens counts once, as the output layer
it is tied to. Recomputed activations do not count: it is what the model needs, not what was done.
"""

from __future__ import annotations

import re

from torch import nn

_PEAKS: dict[str, float] = {  # dense bf16, TFLOP/s, as NVIDIA's data sheets state them; the first name that fits
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "A100": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 149.7,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
}


def peak_flops(gpu: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name; None where it is not known."""
    return next((tera * 1e12 for name, tera in _PEAKS.items() if re.search(rf"\b{name}\b", gpu)), None)


def decoder_flops_per_token(model: nn.Module, layers: int, width: int, tokens: int) -> float:
    """FLOP of a training step for one token of a sequence of `tokens`: 6 N + 12 L (H Q) T, where H Q is the width."""
    positions = sum(p.numel() for name, p in model.named_parameters() if "position" in name)
    parameters = sum(p.numel() for p in model.parameters()) - positions
    return 6.0 * parameters + 12.0 * layers * width * tokens
