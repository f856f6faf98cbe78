"""What the tests of Hugging Face's part share: tiny models, made once, and ranks that have imported the libraries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.forked_ranks import COMMON, RankServer

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
