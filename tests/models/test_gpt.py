"""The gpt: causal, with labels shifted as Hugging Face does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from distributed_training.config import ModelConfig
from distributed_training.models import get_model
from distributed_training.runtime.errors import ModelError

ARGS = {"vocab_size": 11, "context": 8, "layers": 2, "heads": 2, "width": 16}


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return get_model("gpt")(ModelConfig(args=ARGS)).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(11, (3, 8), generator=torch.Generator().manual_seed(0))


def test_logits_without_labels(model: torch.nn.Module, ids: torch.Tensor) -> None:
    assert model(ids).shape == (3, 8, 11)
    assert model(input_ids=ids[:, :5]).shape == (3, 5, 11)


def test_labels_are_shifted_inside(model: torch.nn.Module, ids: torch.Tensor) -> None:
    out = model(ids, labels=ids)
    assert torch.equal(out["logits"], model(ids))
    expected = F.cross_entropy(out["logits"][:, :-1].reshape(-1, 11), ids[:, 1:].reshape(-1))
    torch.testing.assert_close(out["loss"], expected)


def test_label_minus_100_is_not_judged(model: torch.nn.Module, ids: torch.Tensor) -> None:
    labels = ids.clone()
    labels[:, 4:] = -100
    torch.testing.assert_close(model(ids, labels=labels)["loss"], model(ids[:, :4], labels=ids[:, :4])["loss"])


def test_no_token_sees_a_later_one(model: torch.nn.Module, ids: torch.Tensor) -> None:
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_padding_is_not_seen(model: torch.nn.Module, ids: torch.Tensor) -> None:
    everything = torch.ones_like(ids)
    torch.testing.assert_close(model(ids, attention_mask=everything), model(ids))
    mask = everything.clone()
    mask[:, :2] = 0  # left padding: what it holds must not matter, and must not give NaN
    changed = ids.clone()
    changed[:, :2] = (changed[:, :2] + 1) % 11
    first, second = model(ids, attention_mask=mask), model(changed, attention_mask=mask)
    assert torch.isfinite(first).all()
    torch.testing.assert_close(first[:, 2:], second[:, 2:])
    assert not torch.allclose(first[:, 2:], model(ids)[:, 2:])


def test_too_long(model: torch.nn.Module) -> None:
    with pytest.raises(ModelError, match=r"sequence of 9 tokens but model\.args\.context=8"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_weights_are_tied_and_initialised_small(model: torch.nn.Module, ids: torch.Tensor) -> None:
    assert [n for n, p in model.named_parameters() if p.shape == (11, 16)] == ["token_embedding.weight"]
    loss = model(ids, labels=ids)["loss"].item()
    assert loss == pytest.approx(torch.tensor(11.0).log().item(), abs=0.2)  # knows nothing yet


def test_learns(model: torch.nn.Module, ids: torch.Tensor) -> None:
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(80):
        optimizer.zero_grad()
        model(ids, labels=ids)["loss"].backward()
        optimizer.step()
    assert model(ids, labels=ids)["loss"].item() < 0.3
