"""Metrics by name: exact over batches of any division, over tokens that are judged only, and over ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn import metrics as reference
from tests.forked_ranks import RankServer
from torch import Tensor, nn

from distributed_training import ArrayDataset, Config, Trainer
from distributed_training.runtime.errors import ConfigError, ModelError

SAMPLES, TOKENS, CLASSES = 23, 6, 4


class Scores(nn.Module):
    """Says what it is given; its loss is the mean over the tokens that are judged, as transformers' models have it."""

    def __init__(self, shifted: bool = False) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))
        self.loss_type = "ForCausalLM" if shifted else "ForTokenClassification"
        self._shifted = shifted

    def forward(self, scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = scores + self.bias
        judged, targets = (logits[:, :-1], labels[:, 1:]) if self._shifted else (logits, labels)
        return {"loss": F.cross_entropy(judged.flatten(0, -2), targets.flatten()), "logits": logits}


class Said(nn.Module):
    """Says what it is given, and leaves the loss to a criterion."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, scores: Tensor) -> Tensor:
        return scores + self.bias


def tokens() -> dict[str, Tensor]:
    """Texts of very different length: most of them hardly judged."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(SAMPLES, TOKENS, CLASSES, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES, TOKENS), generator=generator)
    lengths = 2 + torch.arange(SAMPLES) % (TOKENS - 1)
    labels[torch.arange(TOKENS)[None] >= lengths[:, None]] = -100
    return {"scores": scores, "labels": labels}


def measured_all(batch: int) -> list[dict[str, float]]:
    """Of tokens, of what comes next, and of two classes, in batches that cannot be divided evenly."""
    scores = torch.randn(50, 2, generator=torch.Generator().manual_seed(1))
    return [
        measured(Scores(), tokens(), batch, ["accuracy", "f1", "f1_weighted", "recall"]),
        measured(Scores(shifted=True), tokens(), batch, ["perplexity", "accuracy"]),
        measured(Said(), (scores, torch.arange(50) % 3 % 2), batch, ["f1", "f1_macro"]),
    ]


def measured(model: nn.Module, arrays: Any, batch: int, names: list[str]) -> dict[str, float]:
    config = Config.from_dict({"training": {"batch_size": batch, "metrics": names}})
    trainer = Trainer(model, config=config, run_dir=False)
    try:
        return trainer.evaluate(ArrayDataset(arrays))
    finally:
        trainer.close()


@pytest.mark.parametrize("batch", [1, 5, 23])
def test_tokens_that_are_judged_are_counted_whatever_the_batches(batch: int) -> None:
    arrays = tokens()
    found = measured(Scores(), arrays, batch, ["accuracy", "f1", "f1_micro", "f1_weighted", "precision", "recall"])
    judged = arrays["labels"] != -100
    truth, said = arrays["labels"][judged], arrays["scores"][judged].argmax(-1)
    assert found["loss"] == pytest.approx(F.cross_entropy(arrays["scores"][judged], truth).item(), abs=1e-6)
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(truth, said))
    for name, average in (("f1", "macro"), ("f1_micro", "micro"), ("f1_weighted", "weighted")):
        assert found[name] == pytest.approx(reference.f1_score(truth, said, average=average), abs=1e-6)
    assert found["precision"] == pytest.approx(reference.precision_score(truth, said, average="macro"), abs=1e-6)
    assert found["recall"] == pytest.approx(reference.recall_score(truth, said, average="macro"), abs=1e-6)


@pytest.mark.parametrize("batch", [1, 7])
def test_a_language_model_is_judged_by_what_comes_next(batch: int) -> None:
    arrays = tokens()
    found = measured(Scores(shifted=True), arrays, batch, [])
    scores, labels = arrays["scores"][:, :-1].flatten(0, 1), arrays["labels"][:, 1:].flatten()
    loss = F.cross_entropy(scores, labels).item()
    assert set(found) == {"loss", "perplexity"}
    assert found["loss"] == pytest.approx(loss, abs=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(loss), abs=1e-5)
    found = measured(Scores(shifted=True), arrays, batch, ["accuracy"])
    judged = labels != -100
    assert found["accuracy"] == pytest.approx(float((scores.argmax(-1) == labels)[judged].float().mean()))


class TestTwoClasses:
    def test_f1_is_that_of_class_1(self) -> None:
        scores = torch.randn(50, 2, generator=torch.Generator().manual_seed(1))
        labels = torch.arange(50) % 3 % 2
        found = measured(Said(), (scores, labels), 8, ["f1", "f1_macro"])
        said = scores.argmax(-1)
        assert found["f1"] == pytest.approx(reference.f1_score(labels, said), abs=1e-6)
        assert found["f1_macro"] == pytest.approx(reference.f1_score(labels, said, average="macro"), abs=1e-6)


def test_left_out_it_is_the_accuracy_of_a_classifier() -> None:
    found = measured(Said(), (torch.eye(3), torch.tensor([0, 1, 1])), 2, [])
    assert found == {"loss": pytest.approx(found["loss"]), "accuracy": pytest.approx(2 / 3)}


def test_two_ranks_measure_what_one_process_does(rank_server: RankServer, tmp_path: Path) -> None:
    rank_server.start(2, ["-m", "tests.training.ranks.metrics_job", str(tmp_path / "found.json")]).succeed()
    for found, expected in zip(json.loads((tmp_path / "found.json").read_text()), measured_all(batch=5)):
        assert found == pytest.approx(expected, rel=1e-6)


def test_names_that_are_not_known_or_do_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"training\.metrics\[0\]='acuracy' must be one of .*did you mean accuracy"):
        Config.from_dict({"training": {"metrics": ["acuracy"]}})
    with pytest.raises(ConfigError, match="metric 'fl' is none of accuracy"):
        Trainer(Said(), run_dir=False).evaluate((torch.eye(3), torch.arange(3)), ["fl"])
    with pytest.raises(ModelError, match="'f1' compares classes"):
        measured(Said(), (torch.zeros(4, 2), torch.zeros(4, 2)), 2, ["f1"])
