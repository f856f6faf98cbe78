"""From one epoch to the next nothing of the memory bound is lost."""

from __future__ import annotations

from tests.feed.conftest import StartLoader
from tests.feed.test_feed import fingerprint, local, server_for


def test_what_training_took_last_is_forgotten_when_an_epoch_begins(start_loader: StartLoader) -> None:
    epochs = 6
    with server_for("arrays", epochs=epochs) as server:
        start_loader(server.link())
        source = server.source()
        for epoch in range(epochs):
            assert fingerprint(source.batches(epoch)) == local("arrays", epoch)
        server.hub.seek(epochs, 0)
        assert server.hub._credit.waiting == 0
