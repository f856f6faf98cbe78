"""A secret that both sides were given in a file takes the place of the one in a pairing link, and is shown nowhere."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

import pytest
from tests.launching import free_port
from tests.split.conftest import Start

from distributed_training.config import Config
from distributed_training.feed.pairing import encode_token
from distributed_training.runtime.errors import ConfigError
from distributed_training.split.listening import known_token, links_to


def config_with(path: Path, **network: str) -> Config:
    return Config.from_dict({"network": {"token_file": str(path), **network}})


def test_a_token_is_read_and_used_for_an_address(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{secrets.token_urlsafe(24)}\n")
    (link,) = links_to(None, None, None, config_with(path, gpu_host="gpu-server"))

    assert link.address == "gpu-server:29500"
    assert link.token is not None
    assert encode_token(link.token) == path.read_text().strip()
    assert link.without_token() == "dtrain://gpu-server:29500"


def test_the_token_of_a_link_wins(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(secrets.token_urlsafe(24))
    given = f"dtrain+ws://{secrets.token_urlsafe(24)}@gpu.example:443"

    (link,) = links_to(given, None, None, config_with(path))
    assert link.token != known_token(config_with(path))
    assert str(link) == given


@pytest.mark.parametrize("text", [None, "", "short", "no token at all: %"])
def test_a_file_without_a_token_says_so(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=r"network\.token_file: .*token.*token_urlsafe"):
        known_token(config_with(path))


def test_a_training_over_tls_with_the_file_on_both_sides(start: Start, in_tmp: Path) -> None:
    secret, port = secrets.token_urlsafe(24), free_port()
    for side in ("gpu", "cpu", "other"):
        Path(side).write_text(secret if side != "other" else secrets.token_urlsafe(24))
    own = ["training.device=cpu", "training.epochs=2", f"network.port={port}", "run.progress=plain"]
    name = socket.gethostname()
    (server,) = start(["serve", *own, "network.gpu_host=0.0.0.0", "network.token_file=gpu", "run.name=fed"])
    server.until("?fp=")
    feed = ["feed", *own, f"network.gpu_host={name}"]
    stranger, loader = start([*feed, "network.token_file=other"], [*feed, "network.token_file=cpu"])

    said = server.end()
    assert "Training completed (2 epochs, 46 steps" in said
    assert "loaded " in loader.end()
    assert "token" in stranger.end()
    assert secret not in said
    kept = Path("runs/fed/config.yaml").read_text()
    assert "token_file: gpu" in kept
    assert secret not in kept
