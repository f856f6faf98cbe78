"""The whole walk of the shipped config: train alone and on ranks of `accelerate launch`, push, load what arrived."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.forked_ranks import RankServer
from tests.huggingface.hub_stand_in import TOKEN, HubStandIn

from distributed_training.cli.push import push

transformers = pytest.importorskip("transformers")
DTRAIN = ["-m", "distributed_training"]
QUICK = ["training.epochs=2", "data.args.samples=48", "training.device=cpu", "run.progress=off", "run.deadline=60"]


def metrics(run: Path) -> list[dict[str, float]]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "metrics"]


@pytest.mark.timeout(300)
def test_train_push_and_load_what_arrived(
    rank_server: RankServer,
    place: Path,
    hub: HubStandIn,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("distributed_training.cli.push.show_logs", lambda: None)  # process-wide
    own = {"PWD": str(place), "HF_TOKEN": TOKEN}
    text = [*DTRAIN, "train", "configs/text.yaml", *QUICK]
    basic = rank_server.start_alone([*text, "training.type=basic", "run.name=basic"], **own).succeed()
    assert "dtrain push runs/basic --repo USER/NAME" in basic
    launched = {**own, "ACCELERATE_MIXED_PRECISION": "no"}  # what `accelerate launch` sets for its ranks
    words = [*text, "training.type=accelerated", "strategy.zero_stage=2", "run.name=zero"]
    rank_server.start(2, words, **launched).succeed()
    expected, found = metrics(place / "runs" / "basic"), metrics(place / "runs" / "zero")
    for key in ("train_loss", "val_loss", "val_accuracy"):
        curves = [[event[key] for event in events if key in event] for events in (expected, found)]
        assert curves[1] == pytest.approx(curves[0], abs=2e-3)  # the tiny model has dropout, which ranks draw apart
        assert curves[0]

    push(Path("runs/zero"), "me/topics", private=True)
    pushed = "".join(capfd.readouterr())
    assert f"{hub.address}/me/topics" in pushed
    assert hub.repos["me/topics"]["visibility"] == "private"
    (place / "fetched").mkdir()
    for name, content in hub.files["me/topics"].items():
        (place / "fetched" / name).write_bytes(content)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(place / "fetched")
    assert loaded.config.id2label == {0: "cooking", 1: "space", 2: "sport"}
    assert transformers.AutoTokenizer.from_pretrained(place / "fetched")("a cake").input_ids
    assert "| accuracy |" in (place / "fetched" / "README.md").read_text()

    everything = [file for file in place.rglob("*") if file.is_file() and not file.is_symlink()]
    assert not [file for file in everything if TOKEN.encode() in file.read_bytes()]
    assert TOKEN not in basic + pushed
