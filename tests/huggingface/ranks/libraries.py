"""What ranks that train models of transformers import; forked from a process that has, they need not."""

from __future__ import annotations

import accelerate
import datasets
import matplotlib.pyplot
import peft
import torch
import torch.distributed.fsdp
import transformers.models.bert.modeling_bert
import transformers.models.llama.modeling_llama

from distributed_training.strategies.deepspeed import import_deepspeed

__all__ = ["accelerate", "datasets", "matplotlib", "peft", "torch", "transformers"]

import_deepspeed(torch.device("cpu"))
