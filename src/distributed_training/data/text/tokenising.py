"""Texts made into token ids and labels: in parallel, and only once for a tokenizer and settings; then cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from distributed_training.data.text.columns import Columns, choose_columns
from distributed_training.data.text.labels import Labels, check_numbers, find_labels
from distributed_training.data.text.packing import Packer
from distributed_training.data.text.quiet import quiet_unless_watched
from distributed_training.data.text.settings import ProcessSettings
from distributed_training.data.text.tokenizers import fingerprint, longest_input
from distributed_training.data.text.tokens import NOT_JUDGED, Padding, TokenDataset
from distributed_training.data.text.turns import in_turn
from distributed_training.runtime.environment import environment_for_a_while
from distributed_training.runtime.errors import ConfigError, DataError

VERSION = 1
"""Of what is made of a text; another one leaves older caches alone."""
_BLOCK = 1024  # tokens of a packed block, where the model takes more and nobody says how many


@dataclass(frozen=True)
class Tokenising:
    """What is done to every text of a dataset. Made from the training data; the held-out data gets the same."""

    tokenizer: Any
    settings: ProcessSettings
    columns: Columns
    labels: Labels | None
    most: int | None
    """Most tokens that the model takes."""
    where: str
    """The data, as errors name it."""

    @classmethod
    def for_data(cls, dataset: Any, tokenizer: Any, settings: ProcessSettings, where: str) -> Tokenising:
        """Find out what is what in the training data. Refuses columns, labels and lengths that do not fit."""
        columns = choose_columns(dataset.column_names, settings, where)
        labels = find_labels(dataset, columns.label, settings, where) if columns.label is not None else None
        if settings.task == "token_classification" and not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"{type(tokenizer).__name__} cannot say which word a token is from; token_classification needs a fast "
                "tokenizer (one with a tokenizer.json)"
            )
        most = longest_input(tokenizer)
        if settings.max_length is not None and most is not None and settings.max_length > most:
            raise ConfigError(f"data.args.max_length={settings.max_length}, but the model takes no more than {most}")
        if settings.padding == "max_length" and settings.max_length is None and most is None:
            raise ConfigError("data.args.padding=max_length needs data.args.max_length: the tokenizer knows no limit")
        return cls(tokenizer, settings, columns, labels, settings.max_length or most, where)

    def process(self, dataset: Any, split: str = "") -> TokenDataset:
        """A dataset of token ids, from the cache if it was made before."""
        where = f"{self.where}, {split}" if split else self.where
        choose_columns(dataset.column_names, self.settings, where)  # the held-out data might lack one
        key = self._key(dataset)
        with self._alone(dataset, key):
            table = self._tokenised(dataset, key, where)
            if self.settings.packing:
                table = _packed(table, self.block, key, where)
        if not self.settings.packing:
            table = self._checked(table, where)
        labels = self.labels
        return TokenDataset(
            table,
            self.padding,
            labels_are_inputs=self.settings.task == "causal_lm",
            classes=labels.names if labels is not None else None,
            num_classes=labels.count if labels is not None else None,
            name=where,
        )

    @property
    def block(self) -> int:
        """Tokens of a packed block."""
        return self.settings.max_length or min(self.most or _BLOCK, _BLOCK)

    def __call__(self, batch: dict[str, list[Any]], ids: list[int]) -> dict[str, list[Any]]:
        """Token ids of some samples; called by the library, perhaps in another process."""
        texts, settings = batch[self.columns.inputs], self.settings
        pairs = batch[self.columns.pair] if self.columns.pair is not None else None
        for column, values in ((self.columns.inputs, texts), (self.columns.pair, pairs)):
            if values is not None and any(value is None for value in values):
                at = next(at for at, value in enumerate(values) if value is None)
                raise DataError(
                    f"{self.where}, sample {ids[at]}, column {column}: no text; fill it in or leave such samples out"
                )
        cut = settings.truncation and not settings.packing
        by_word = settings.task == "token_classification"
        try:
            made = self.tokenizer(
                texts,
                pairs,
                truncation=cut,
                max_length=self.most if cut else None,
                is_split_into_words=by_word,
                return_attention_mask=False,
                return_token_type_ids=self._takes_kinds,
                verbose=False,
            )
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self.where}, column {self.columns.inputs}: the tokenizer does not take what is in it "
                f"({type(texts[0]).__name__}): {' '.join(str(error).split())[:300]}"
            ) from error
        result = {"input_ids": made["input_ids"]}
        if self._takes_kinds:
            result["token_type_ids"] = made["token_type_ids"]
        if settings.task == "causal_lm":
            result["input_ids"] = [self._ended(tokens) for tokens in made["input_ids"]]
        if self.labels is not None:
            labels = batch[self.labels.column]
            result["labels"] = (
                [self._of_words(made.word_ids(at), labels[at], texts[at], ids[at]) for at in range(len(texts))]
                if by_word
                else self.labels.encode(labels, ids[0], self.where)
            )
        return result

    @property
    def _takes_kinds(self) -> bool:
        return "token_type_ids" in self.tokenizer.model_input_names and self.settings.task != "causal_lm"

    def _ended(self, tokens: list[int]) -> list[int]:
        """A text with its end marked, if there is room: so that texts are told apart, and a model learns to stop."""
        end = self.tokenizer.eos_token_id
        if end is None or not tokens or tokens[-1] == end:
            return tokens
        if not self.settings.packing and self.most is not None and len(tokens) >= self.most:
            return tokens
        return [*tokens, end]

    def _of_words(self, word_ids: list[int | None], labels: Any, words: Any, sample: int) -> list[int]:
        """The labels of words on their tokens; special tokens, and all but a word's first, are not judged."""
        assert self.labels is not None
        if labels is None or len(labels) != len(words):
            raise DataError(
                f"{self.where}, sample {sample}: {len(words)} words in {self.columns.inputs}, but "
                f"{0 if labels is None else len(labels)} labels in {self.labels.column}; every word needs one"
            )
        numbers = self.labels.encode(list(labels), 0, f"{self.where}, sample {sample}", "word")
        result, before = [], None
        for word in word_ids:
            judged = word is not None and (word != before or self.settings.label_all_tokens)
            result.append(numbers[word] if word is not None and judged else NOT_JUDGED)
            before = word
        return result

    def _tokenised(self, dataset: Any, key: str, where: str) -> Any:
        """The table of the ids, one row for each sample."""
        rows = dataset.select_columns(self.columns.used)
        num_proc = min(self.settings.num_proc or 1, len(rows))
        with ExitStack() as stack:
            stack.enter_context(quiet_unless_watched())
            if num_proc > 1:  # processes beside each other, not threads in each of them as well
                stack.enter_context(environment_for_a_while(TOKENIZERS_PARALLELISM="false"))
            return rows.map(
                self,
                batched=True,
                with_indices=True,
                remove_columns=rows.column_names,
                features=self._features(),
                num_proc=num_proc if num_proc > 1 else None,
                new_fingerprint=key,
                desc=f"tokenising {where}",
            )

    def _features(self) -> Any:
        from datasets import Features, Sequence, Value

        features: dict[str, Any] = {"input_ids": Sequence(Value("int32"))}
        if self._takes_kinds:
            features["token_type_ids"] = Sequence(Value("int8"))
        if self.labels is not None:
            kind = Value("float32" if self.labels.values else "int64")
            features["labels"] = Sequence(kind) if self.settings.task == "token_classification" else kind
        return Features(features)

    def _checked(self, table: Any, where: str) -> Any:
        """The table without empty texts of a language model; refuses texts that are too long, and wrong labels."""
        from distributed_training.data.text.ragged import Ragged

        ids = Ragged(table, "input_ids")
        long = np.flatnonzero(ids.lengths > self.most) if self.most is not None else np.zeros(0, dtype=np.int64)
        if len(long):
            raise DataError(
                f"{where}, sample {long[0]}: {ids.lengths[long[0]]} tokens, but the model takes {self.most} "
                f"({len(long)} of {len(ids.lengths)} samples are longer); set data.args.truncation=true to cut them "
                "off" + (", or data.args.packing=true to join and divide them" if self.labels is None else "")
            )
        if self.labels is None:
            full = np.flatnonzero(ids.lengths)
            if not len(full):
                raise DataError(f"{where}: every text is empty")
            return table if len(full) == len(ids.lengths) else table.select(full)
        if self.settings.task == "token_classification":
            numbers = Ragged(table, "labels")
            samples = np.repeat(np.arange(len(numbers.lengths)), numbers.lengths)
            check_numbers(numbers.gather(np.arange(len(numbers.lengths))), self.labels, samples, where)
        elif self.labels.values:
            values = np.asarray(table.with_format("numpy")["labels"][:])
            if not np.isfinite(values).all():
                row = int(np.flatnonzero(~np.isfinite(values))[0])
                raise DataError(f"{where}, sample {row}, column {self.labels.column}: not a finite number")
        else:
            check_numbers(np.asarray(table.with_format("numpy")["labels"][:]), self.labels, None, where)
        return table

    @property
    def padding(self) -> Padding:
        """How samples become rows of a batch."""
        tokenizer, settings = self.tokenizer, self.settings
        token = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        return Padding(
            token=token or 0,
            kind=getattr(tokenizer, "pad_token_type_id", 0) or 0,
            side=tokenizer.padding_side,
            mode=settings.padding,
            length=self.block if settings.packing else self.most,
            multiple=settings.pad_to_multiple_of,
            most=self.most,
        )

    def _key(self, dataset: Any) -> str:
        """What the cache knows the result by: the data, the tokenizer and all that matters of the settings."""
        facts = asdict(self.settings)
        for name in ("num_proc", "padding", "pad_to_multiple_of", "num_labels", "labels"):
            facts.pop(name)
        parts = [VERSION, dataset._fingerprint, fingerprint(self.tokenizer), facts, asdict(self.columns), self.most]
        parts.append(asdict(self.labels) if self.labels is not None else None)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    @contextmanager
    def _alone(self, dataset: Any, key: str) -> Iterator[None]:
        """Of several ranks of this machine one tokenises; the others wait and find it in the cache."""
        if not dataset.cache_files:  # in memory, where nothing is cached
            yield
            return
        with in_turn(Path(dataset.cache_files[0]["filename"]).parent / f"dtrain-{key}"):
            yield


def _packed(table: Any, block: int, key: str, where: str) -> Any:
    """Blocks of equal length cut from all samples."""
    with quiet_unless_watched():
        blocks = table.with_format("arrow").map(
            Packer(block),
            batched=True,
            remove_columns=table.column_names,
            new_fingerprint=hashlib.sha256(f"{key}:{block}".encode()).hexdigest()[:32],
            desc=f"packing {where}",
        )
    if not len(blocks):
        total = int(sum(len(row) for row in table["input_ids"]))
        raise DataError(
            f"{where}: {total} tokens in all, which do not fill one block of {block}; set data.args.max_length lower"
        )
    return blocks.with_format(None)
