"""Tokenizers and image processors by name, and how much text their model takes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from distributed_training.runtime.errors import DataError
from distributed_training.runtime.hub import hub_errors, hub_token, without_token
from distributed_training.runtime.imports import require

_UNLIMITED = 10**9  # tokenizers that know of no limit say a very large number
_STATE = ("truncation", "padding")  # of the last call, not of the tokenizer


def load_tokenizer(checkpoint: str, revision: str | None = None) -> Any:
    """The tokenizer of a model on the Hub or in a folder."""
    return _load("AutoTokenizer", checkpoint, revision, "tokenizer")


def load_image_processor(checkpoint: str, revision: str | None = None) -> Any:
    """The image processor of a model on the Hub or in a folder."""
    return _load("AutoImageProcessor", checkpoint, revision, "image processor")


def _load(kind: str, checkpoint: str, revision: str | None, what: str) -> Any:
    transformers = require("transformers", "hf", "data.dataset=huggingface")
    where = f"data.args.tokenizer={checkpoint}"
    path = Path(checkpoint).expanduser()
    if (checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1) and not path.is_dir():
        raise DataError(f"{where}: no such folder; give one that save_pretrained made, or a name on the Hub")
    try:
        with hub_errors(where, DataError):
            name = str(path) if path.is_dir() else checkpoint
            return getattr(transformers, kind).from_pretrained(name, revision=revision or "main", token=hub_token())
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = without_token(" ".join(str(error).split())[:400])
        raise DataError(f"{where}: its {what} cannot be loaded: {reason}") from error


def longest_input(tokenizer: Any) -> int | None:
    """The most tokens that the tokenizer's model takes; None where neither of them says."""
    limits = [tokenizer.model_max_length] if 0 < (tokenizer.model_max_length or 0) < _UNLIMITED else []
    place = getattr(tokenizer, "name_or_path", "") or ""
    config = Path(place) / "config.json"
    if place and config.is_file():
        try:
            facts = json.loads(config.read_text(encoding="utf-8"))
        except ValueError:
            facts = {}
        limits += [facts[key] for key in ("max_position_embeddings", "n_positions") if isinstance(facts.get(key), int)]
    elif place and not limits:
        limits += _limit_of_config(place)
    return min(limits, default=None)


def _limit_of_config(place: str) -> list[int]:
    """What the config of a model on the Hub says; a tokenizer usually knows it itself."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(place, token=hub_token())
    except (OSError, ValueError):
        return []
    limit = getattr(config, "max_position_embeddings", None)
    return [limit] if isinstance(limit, int) and limit > 0 else []


def fingerprint(tokenizer: Any) -> str:
    """Equal for tokenizers that make the same ids. What one was last asked for is part of it, but not of this."""
    if getattr(tokenizer, "is_fast", False):
        facts = json.loads(tokenizer.backend_tokenizer.to_str())
        for key in _STATE:
            facts.pop(key, None)
    else:
        facts = {"class": type(tokenizer).__qualname__, "vocabulary": sorted(tokenizer.get_vocab().items())}
    facts["special"] = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]
