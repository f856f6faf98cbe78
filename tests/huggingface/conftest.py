"""What the tests of Hugging Face's part share: tiny models, made once, and ranks that have imported the libraries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.forked_ranks import COMMON, RankServer
from tests.huggingface.hub_stand_in import TOKEN, HubStandIn
from tests.launching import ROOT

pytest.importorskip("transformers")  # CI installs it
pytest.importorskip("peft")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny models."""
    from scripts.make_tiny_text_model import make

    folder = tmp_path_factory.mktemp("tiny")
    make(folder)
    return folder


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    """Starts ranks that have imported transformers, peft, Accelerate and DeepSpeed, too."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(folder / "hf"))  # read when the libraries are imported
        server = RankServer(folder, [*COMMON, "tests.huggingface.ranks.libraries"])
    yield server
    server.close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """The stand-in, where the client in this process looks for the Hub."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    constants = pytest.importorskip("huggingface_hub.constants")
    stand_in = HubStandIn()
    monkeypatch.setattr(constants, "ENDPOINT", stand_in.address)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield stand_in
    huggingface_hub.close_session()
    stand_in.close()


@pytest.fixture
def place(in_tmp: Path, tiny: Path) -> Path:
    """A folder as a user has it after cloning and `make_tiny_text_model.py data/tiny`."""
    for name in ("configs", "examples"):
        (in_tmp / name).symlink_to(ROOT / name)
    (in_tmp / "data").mkdir()
    (in_tmp / "data" / "tiny").symlink_to(tiny)
    return in_tmp
