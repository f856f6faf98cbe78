"""What examples and tests train on: tiny models made from the shipped text, always the same."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from scripts.make_tiny_text_model import TAGS, TEXT, TOPICS, make

CLASSES = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "causal-lm": "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
}


@pytest.mark.parametrize("task", CLASSES)
def test_loads_and_is_tiny(task: str, tiny: Path) -> None:
    import transformers

    model = getattr(transformers, CLASSES[task]).from_pretrained(tiny / task)
    assert 10_000 < sum(p.numel() for p in model.parameters()) < 150_000


def test_the_same_bytes_each_time(tiny: Path, tmp_path: Path) -> None:
    for task, folder in make(tmp_path, ["sequence-classification", "causal-lm"]).items():
        for file in folder.iterdir():
            assert file.read_bytes() == (tiny / task / file.name).read_bytes(), file


def test_the_shipped_text_fits_the_models(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny / "sequence-classification")
    with (TEXT / "topics" / "validation.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["label"] for row in rows} == set(TOPICS)
    ids = tokenizer([row["text"] for row in rows])["input_ids"]
    assert all(tokenizer.unk_token_id not in row for row in ids)  # every letter is known
    lines = (TEXT / "names" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert {tag for line in lines for tag in json.loads(line)["tags"]} == set(TAGS)
