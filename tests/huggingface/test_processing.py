"""Texts made into batches: tokenised, padded, packed, labelled; and every mistake in them named before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.dataset import DatasetContract

from distributed_training.config.schema import DataConfig
from distributed_training.data import Loader, Plan
from distributed_training.data.base import Dataset, Share
from distributed_training.data.sources import load_dataset
from distributed_training.data.text.tokens import TokenDataset
from distributed_training.huggingface import load_data, process
from distributed_training.runtime.errors import ConfigError, DataError

TEXT = Path(__file__).parents[2] / "examples" / "text"
ROWS = [
    {"text": "The rocket left the launch pad.", "label": "space"},
    {"text": "Boil the potatoes.", "label": "cooking"},
    {"text": "She won the race by less than a tenth of a second, and the crowd sang.", "label": "sport"},
    {"text": "The oven was too hot.", "label": "cooking"},
    {"text": "A comet grows a tail.", "label": "space"},
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def bert(tiny: Path) -> Any:
    from distributed_training.huggingface import load_tokenizer

    return load_tokenizer(str(tiny / "sequence-classification"))


@pytest.fixture(scope="module")
def llama(tiny: Path) -> Any:
    from distributed_training.huggingface import load_tokenizer

    return load_tokenizer(str(tiny / "causal-lm"))


def rows(some: list[dict[str, Any]]) -> Any:
    import datasets

    return datasets.Dataset.from_list(some)


def everything(dataset: Dataset) -> dict[str, torch.Tensor]:
    batch: dict[str, torch.Tensor] = dataset.fetch(np.arange(len(dataset)))
    return batch


class TestPaddedToMaxLength(DatasetContract):
    @pytest.fixture
    def dataset(self, bert: Any) -> Dataset:
        made: Dataset = process(rows(ROWS), bert, padding="max_length", max_length=40)
        return made


class TestPacked(DatasetContract):
    @pytest.fixture
    def dataset(self, llama: Any) -> Dataset:
        made: Dataset = process(rows(ROWS), llama, task="causal_lm", packing=True, max_length=8)
        return made


class TestClassification:
    def test_is_what_the_tokenizer_says_padded_to_the_longest(self, bert: Any) -> None:
        dataset = process(rows(ROWS), bert)
        assert dataset.classes == ["cooking", "space", "sport"]
        batch = dataset.fetch(np.array([3, 0, 1]))
        expected = bert([ROWS[n]["text"] for n in (3, 0, 1)], padding=True, return_tensors="pt")
        assert list(batch) == ["input_ids", "attention_mask", "token_type_ids", "labels"]
        for name in expected:
            assert torch.equal(batch[name], expected[name])
        assert batch["labels"].tolist() == [0, 1, 0]

    def test_a_sample_is_a_row_of_torch_tensors(self, bert: Any) -> None:
        dataset = process(rows(ROWS), bert)
        assert dataset[1]["input_ids"].tolist() == bert(ROWS[1]["text"])["input_ids"]
        assert dataset[-1]["labels"] == torch.tensor(1)
        whole = dataset.to_datasets()
        assert whole.column_names == ["input_ids", "token_type_ids", "labels", "attention_mask"]
        assert torch.equal(whole[1]["input_ids"], dataset[1]["input_ids"])

    def test_pairs_of_texts(self, bert: Any) -> None:
        some = [{"text": row["text"], "other": "A tail.", "label": 0} for row in ROWS]
        dataset = process(rows(some), bert, text_pair="other")
        expected = bert(ROWS[0]["text"], "A tail.")
        assert dataset[0]["input_ids"].tolist() == expected["input_ids"]
        assert dataset[0]["token_type_ids"].tolist() == expected["token_type_ids"]

    def test_multiples_stay_within_what_the_model_takes(self, bert: Any) -> None:
        dataset = process(rows(ROWS), bert, pad_to_multiple_of=8)
        assert everything(dataset)["input_ids"].shape[1] % 8 == 0
        assert process(rows(ROWS), bert, pad_to_multiple_of=1000)[0]["input_ids"].shape == (128,)

    def test_values_to_predict(self, bert: Any) -> None:
        dataset = process(rows([{"text": "hot", "label": 0.5}, {"text": "cold", "label": -2.0}]), bert)
        assert everything(dataset)["labels"].tolist() == [0.5, -2.0]
        assert everything(dataset)["labels"].dtype == torch.float32
        assert dataset.num_classes == 1

    def test_held_out_data_is_numbered_like_the_training_data(self, bert: Any) -> None:
        made = process({"validation": rows(ROWS[:1]), "train": rows(ROWS)}, bert)
        assert made["validation"][0]["labels"] == torch.tensor(1)
        with pytest.raises(DataError, match=r"sample 0, column label: label 'sprot' is none of .*did you mean sport"):
            process({"train": rows(ROWS), "test": rows([{"text": "a", "label": "sprot"}])}, bert)


class TestTokenClassification:
    def test_labels_stand_on_the_first_piece_of_a_word(self, bert: Any) -> None:
        made = process(load_data(TEXT / "names"), bert, task="token_classification")["train"]
        assert made.classes == ["B-LOC", "B-ORG", "B-PER", "I-LOC", "I-ORG", "I-PER", "O"]
        words = ["Ada", "Lovelace", "wrote", "the", "first", "program", "in", "London", "."]
        encoded = bert(words, is_split_into_words=True)
        assert made[0]["input_ids"].tolist() == encoded["input_ids"]
        tags, seen = made[0]["labels"].tolist(), set()
        for place, word in enumerate(encoded.word_ids()):
            judged = word is not None and word not in seen
            assert (tags[place] != -100) == judged
            seen.add(word)
        assert [tag for tag in tags if tag != -100] == [2, 5, 6, 6, 6, 6, 6, 0, 6]

    def test_every_piece_if_wanted(self, bert: Any) -> None:
        some = [{"tokens": ["unbelievably", "hot"], "tags": [1, 0]}]
        made = process(rows(some), bert, task="token_classification", label_all_tokens=True)
        tags = made[0]["labels"].tolist()
        assert tags[0] == tags[-1] == -100
        assert tags[1:-1] == [1] * (len(tags) - 3) + [0]

    def test_words_and_tags_must_be_as_many(self, bert: Any) -> None:
        some = [{"words": ["a", "b"], "tags": ["O", "O"]}, {"words": ["a", "b"], "tags": ["O"]}]
        with pytest.raises(DataError, match=r"sample 1: 2 words in words, but 1 labels in tags"):
            process(rows(some), bert, task="token_classification")


class TestLanguageModel:
    def test_packing_is_all_texts_in_a_row(self, llama: Any) -> None:
        made = process(rows(ROWS), llama, task="causal_lm", packing=True, max_length=8)
        tokens = [t for row in ROWS for t in [*llama(row["text"])["input_ids"], llama.eos_token_id]]
        batch = everything(made)
        assert batch["input_ids"].flatten().tolist() == tokens[: len(tokens) // 8 * 8]
        assert torch.equal(batch["labels"], batch["input_ids"])
        assert batch["attention_mask"].all()

    def test_is_the_same_by_two_processes_and_from_the_cache(self, llama: Any, tmp_path: Path) -> None:
        data = load_data(TEXT / "alice", samples=40)
        settings: dict[str, Any] = {"task": "causal_lm", "packing": True, "max_length": 32}
        alone = process(data, llama, **settings)["train"]
        files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")}
        again = process(data, llama, **settings)["train"]
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.arrow")} == files
        two = process(data, llama, num_proc=2, **settings)["train"]
        assert alone.fingerprint() == again.fingerprint() == two.fingerprint()
        assert torch.equal(everything(alone)["input_ids"], everything(two)["input_ids"])

    def test_unpacked_texts_end_and_are_not_judged_behind(self, llama: Any) -> None:
        made = process(rows([{"text": "Boil the potatoes."}, {"text": ""}, {"text": "hot"}]), llama, task="causal_lm")
        assert len(made) == 2  # an empty text teaches nothing
        batch = everything(made)
        ends = [int(row.sum()) - 1 for row in batch["attention_mask"]]
        assert [int(batch["input_ids"][n, end]) for n, end in enumerate(ends)] == [llama.eos_token_id] * 2
        assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
        judged = batch["attention_mask"] == 1
        assert torch.equal(batch["labels"][judged], batch["input_ids"][judged])


class TestImages:
    def test_by_an_image_processor(self, tiny: Path, tmp_path: Path) -> None:
        from PIL import Image

        for number, kind in enumerate(("dark", "light")):
            (tmp_path / "pictures" / kind).mkdir(parents=True)
            for copy in range(2):
                image = Image.new("L", (20, 24), 40 + 150 * number + copy)
                image.save(tmp_path / "pictures" / kind / f"{copy}.png")
        data = load_data(tmp_path / "pictures")
        made = process(data, str(tiny / "image-classification"), task="image_classification")["train"]
        assert made.classes == ["dark", "light"]
        batch = made.fetch(np.array([3, 0]))
        assert batch["pixel_values"].shape == (2, 3, 16, 16)
        assert batch["pixel_values"].dtype == torch.float32
        assert batch["labels"].tolist() == [1, 0]
        assert batch["pixel_values"][0].mean() > batch["pixel_values"][1].mean()
        assert (
            made.fingerprint()
            == process(data, str(tiny / "image-classification"), task="image_classification")["train"].fingerprint()
        )


class TestPlanned:
    """The way to the loop: any step of any epoch, in any number of shares."""

    @pytest.fixture
    def dataset(self, bert: Any) -> TokenDataset:
        made: TokenDataset = process(load_data(TEXT / "topics", split="train[:60]"), bert, truncation=True)
        return made

    def test_a_resume_in_the_middle_of_an_epoch_sees_the_same_batches(self, dataset: TokenDataset) -> None:
        plan = Plan(len(dataset), 8, seed=3)
        whole = dict(Loader(dataset, plan).batches(1))
        resumed = dict(Loader(dataset, plan).batches(1, start=5))
        assert list(resumed) == [5, 6, 7]
        for step, batch in resumed.items():
            assert batch.ids.tolist() == whole[step].ids.tolist()
            assert all(torch.equal(batch.data[name], whole[step].data[name]) for name in batch.data)

    def test_shares_are_the_rows_of_the_whole_but_for_padding(self, dataset: TokenDataset) -> None:
        plan = Plan(len(dataset), 8, seed=3)
        loaders = [Loader(dataset, plan) for _ in range(3)]
        for rank, loader in enumerate(loaders[1:]):
            loader.share = Share(rank, 2)
        whole, first, second = (next(iter(loader.batches(0)))[1].data for loader in loaders)
        for name in ("input_ids", "labels"):
            rows = [row for part in (first, second) for row in part[name]]
            for row, expected in zip(rows, whole[name]):
                width = row.numel()
                assert torch.equal(row.flatten(), expected.flatten()[:width])
        assert len(first["labels"]) + len(second["labels"]) == 8

    def test_a_stream_is_read_in_its_order(self, llama: Any, tmp_path: Path) -> None:
        stream = load_data(TEXT / "alice", streaming=True, split="validation")
        made = process(stream, llama, task="causal_lm", packing=True, max_length=32)
        planned = process(
            load_data(TEXT / "alice", split="validation"), llama, task="causal_lm", packing=True, max_length=32
        )
        for number, sample in zip(range(20), made):
            assert torch.equal(sample["input_ids"], planned[number]["input_ids"])
        with pytest.raises(ConfigError, match="packing=True or padding='max_length'"):
            process(stream, llama, task="causal_lm")


class TestBadInput:
    def test_a_missing_column(self, bert: Any) -> None:
        with pytest.raises(DataError, match=r"no column 'txet' \(data\.args\.text\) among text, label; did you mean"):
            process(rows(ROWS), bert, text="txet")
        with pytest.raises(DataError, match=r"which column is the label\? None of .* is among text, stars; set data"):
            process(rows([{"text": "a", "stars": 1}]), bert)

    def test_a_split_without_samples(self, bert: Any) -> None:
        with pytest.raises(DataError, match="split test: holds no samples"):
            process({"train": rows(ROWS), "test": rows(ROWS).select([])}, bert)

    def test_a_text_that_is_too_long(self, bert: Any) -> None:
        some = [*ROWS, {"text": "hot " * 200, "label": "cooking"}]
        with pytest.raises(DataError, match=r"sample 5: 202 tokens, but the model takes 128 \(1 of 6.*truncation=true"):
            process(rows(some), bert)
        assert len(process(rows(some), bert, truncation=True)[5]["input_ids"]) == 128
        with pytest.raises(ConfigError, match="max_length=1000, but the model takes no more than 128"):
            process(rows(some), bert, max_length=1000)

    @pytest.mark.parametrize("label", [3, -1])
    def test_a_label_that_is_no_class(self, bert: Any, label: int) -> None:
        some = [{"text": "a", "label": 0}, {"text": "b", "label": label}]
        with pytest.raises(DataError, match=rf"sample 1, column label: label {label} is not in 0\.\.2.*num_labels"):
            process(rows(some), bert, num_labels=3)

    def test_more_classes_than_num_labels(self, bert: Any) -> None:
        with pytest.raises(DataError, match=r"3 classes \(cooking, space, sport\), but num_labels=2"):
            process(rows(ROWS), bert, num_labels=2)

    def test_no_text_and_no_label(self, bert: Any) -> None:
        with pytest.raises(DataError, match="sample 5, column text: no text"):
            process(rows([*ROWS, {"text": None, "label": "space"}]), bert)
        with pytest.raises(DataError, match="sample 5, column label: no label"):
            process(rows([*ROWS, {"text": "a", "label": None}]), bert)
        held_out = rows([{"text": "a", "label": 1}, {"text": "b", "label": None}])
        with pytest.raises(DataError, match="sample 1, column label: no label"):
            process({"train": held_out.select([0]), "test": held_out}, bert)

    def test_yes_and_no_are_classes(self, bert: Any) -> None:
        made = process(rows([{"text": "a", "label": True}, {"text": "b", "label": False}]), bert)
        assert everything(made)["labels"].tolist() == [1, 0]
        assert made.num_classes == 2

    def test_a_tag_that_is_no_class(self, bert: Any) -> None:
        some = {"train": rows([{"words": ["a"], "tags": ["O"]}]), "test": rows([{"words": ["a"], "tags": ["P"]}])}
        with pytest.raises(DataError, match=r"sample 0, word 0, column tags: label 'P' is none of"):
            process(some, bert, task="token_classification")

    def test_packing_less_than_a_block(self, llama: Any) -> None:
        with pytest.raises(DataError, match=r"\d+ tokens in all, which do not fill one block of 128"):
            process(rows(ROWS), llama, task="causal_lm", packing=True)

    def test_no_padding_and_different_lengths(self, bert: Any) -> None:
        dataset = process(rows(ROWS), bert, padding="none")
        with pytest.raises(DataError, match=r"samples 1 and 2 of one batch have \d+ and \d+ tokens"):
            dataset.fetch(np.array([0, 1, 2]))

    def test_settings_that_are_not_known(self, bert: Any) -> None:
        with pytest.raises(ConfigError, match=r"process\(\) does not take paddign; .*did you mean padding\?"):
            process(rows(ROWS), bert, paddign="longest")

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"data\.args\.tokenizer is not set"):
            load_dataset(DataConfig(dataset="huggingface", root=str(TEXT / "topics")))
        with pytest.raises(DataError, match=r"data\.args\.tokenizer=\./nowhere: no such folder"):
            load_dataset(DataConfig(dataset="huggingface", root=str(TEXT / "topics"), args={"tokenizer": "./nowhere"}))


def test_by_config(tiny: Path) -> None:
    args = {"tokenizer": str(tiny / "sequence-classification"), "truncation": True}
    splits = load_dataset(DataConfig(dataset="huggingface", root=str(TEXT / "topics"), args=args))
    assert splits.validation is not None
    assert (len(splits.train), len(splits.validation), splits.train.num_classes) == (240, 60, 3)
