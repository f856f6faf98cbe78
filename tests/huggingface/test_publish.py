"""Pushing to the Hub by the real client, against a stand-in for its HTTP API; what is refused, and the token."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.huggingface.hub_stand_in import READ_ONLY, TOKEN, HubStandIn

from distributed_training.huggingface import push
from distributed_training.huggingface.card import Card
from distributed_training.runtime.errors import ConfigError, HubError

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, in_tmp: Path) -> Iterator[HubStandIn]:
    """The stand-in, where the client looks for the Hub, with a token that may write."""
    stand_in = HubStandIn()
    monkeypatch.setattr(constants, "ENDPOINT", stand_in.address)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # speaks to no stand-in
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(in_tmp / "no-login"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield stand_in
    huggingface_hub.close_session()
    stand_in.close()


@pytest.fixture
def folder(in_tmp: Path) -> Path:
    """Something like a model."""
    made = in_tmp / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"\0" * 5000)
    (made / ".env").write_text(f"HF_TOKEN={TOKEN}")
    card = Card(
        "BertForSequenceClassification",
        "sequence_classification",
        1000,
        1000,
        base="google/tiny-bert",
        dataset="topics",
        settings={"training.lr": 0.1},
        metrics={"accuracy": 0.93, "loss": 0.2},
    )
    card.write(made, "me/topics")
    return made


def test_a_model_arrives_whole_with_its_card(hub: HubStandIn, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    address = push(folder, "me/topics", private=True, message="First")
    again = push(folder, "me/topics")

    assert address == again == f"{hub.address}/me/topics"
    assert hub.repos["me/topics"]["visibility"] == "private"
    assert sorted(hub.files["me/topics"]) == ["README.md", "config.json", "model.safetensors"]  # and no .env
    assert hub.files["me/topics"]["model.safetensors"] == b"\0" * 5000
    assert [commit["summary"] for commit in hub.commits] == ["First", "Upload model"]
    sent = b"".join(hub.files["me/topics"].values())
    assert TOKEN not in "".join(capfd.readouterr())
    assert TOKEN.encode() not in sent


def test_the_card_can_be_read_by_the_hubs_own_reader(folder: Path) -> None:
    card = huggingface_hub.ModelCard.load(folder / "README.md")

    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-classification")
    assert card.data.base_model == "google/tiny-bert"
    assert {r.metric_type: r.metric_value for r in card.data.eval_results} == {"accuracy": 0.93, "loss": 0.2}
    assert 'pipeline("text-classification", model="me/topics")' in card.text
    for part in ("| accuracy | 0.9300 |", "| training.lr | 0.1 |", "| torch |", "fine-tuned from `google/tiny-bert`"):
        assert part in card.text


def test_without_a_token_nothing_is_sent(hub: HubStandIn, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")

    with pytest.raises(HubError, match="me/topics: pushing needs a token that may write: set HF_TOKEN"):
        push(folder, "me/topics", private=True)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("token", "message"),
    [("hf_wrong" * 4, "no such repository, or it is private.*HF_TOKEN"), (READ_ONLY, "forbids it to this token")],
)
def test_a_token_that_may_not_is_never_shown(
    hub: HubStandIn, folder: Path, monkeypatch: pytest.MonkeyPatch, token: str, message: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)

    with pytest.raises(HubError, match=message) as caught:
        push(folder, "me/topics")
    assert token not in str(caught.value)


def test_no_network_is_said(
    hub: HubStandIn, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(HubError, match=r"127\.0\.0\.1:9: the Hub cannot be reached"),
    ):
        push(folder, "me/topics")
    assert TOKEN not in caplog.text

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        push(folder, "me/topics")


def test_what_is_no_name_and_no_model_is_refused(hub: HubStandIn, folder: Path, in_tmp: Path) -> None:
    with pytest.raises(ConfigError, match="no name of a repository"):
        push(folder, "me/to pics")
    with pytest.raises(HubError, match="nothing to push"):
        push(in_tmp / "missing", "me/topics")
    assert json.dumps(hub.requests) == "[]"
