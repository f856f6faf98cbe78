"""Numbers of GPUs on a command line: `--gpus 1 8 64`, `--gpus 1,8,64`, or `--gpus 1 --gpus 8`."""

from __future__ import annotations

from collections.abc import Sequence

from distributed_training.config.errors import ConfigError


def counts_and_words(
    given: Sequence[str] | None, words: Sequence[str] | None, option: str = "--gpus"
) -> tuple[tuple[int, ...], list[str]]:
    """(numbers, the words that are left). An option takes one value; numbers after it come as words of the command."""
    texts = [part for text in given or () for part in text.replace(",", " ").split()]
    left = []
    for word in words or ():
        if texts and all(part.isdigit() for part in word.split(",") if part):
            texts += [part for part in word.split(",") if part]
        else:
            left.append(word)
    return tuple(sorted({_count(text, option) for text in texts})), left


def _count(text: str, option: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{option} {text}: give numbers from 1 on, such as {option} 1 8 64")
    return int(text)
