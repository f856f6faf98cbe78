"""Through nginx, with TLS and limits as a tunnel has them: nothing is lost, whatever happens to it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.feed.conftest import StartLoader
from tests.feed.nginx import Nginx
from tests.feed.test_feed import QUICK, fingerprint, local, server_for
from tests.feed.test_training import local_training, network
from tests.training.examples import assert_same_weights, trainer
from torch import Tensor

from distributed_training.feed.dialling import open_link
from distributed_training.feed.doctor.diagnosis import diagnose
from distributed_training.feed.http_upgrade import LostError, RefusedError
from distributed_training.training import Callback, Trainer

IDLE = 2  # seconds after which nginx ends a connection on which nothing is said
SETTINGS = replace(QUICK, silence=1.5)  # so that something is said more often, as with the real limits of a minute


class Restarting(Callback):
    """Ends nginx in the middle of an epoch, and starts it again a little later."""

    def __init__(self, nginx: Nginx) -> None:
        self.nginx = nginx

    def on_step_end(self, trainer: Trainer, step: int, loss: Tensor) -> None:
        if trainer.cursor.global_step == 10:
            self.nginx.stop()
            self.later = threading.Timer(0.5, self.nginx.start)  # how many steps come until then, nobody knows
            self.later.start()

    def on_train_end(self, trainer: Trainer, status: str) -> None:
        self.later.join()


def test_a_training_goes_on_though_nginx_is_restarted(start_loader: StartLoader, tmp_path: Path) -> None:
    net = network()
    settings = replace(SETTINGS, max_steps_ahead=4)
    with (
        server_for("arrays", epochs=2, behind_proxy=True, settings=settings) as server,
        Nginx(tmp_path / "nginx", server.port, IDLE) as nginx,
    ):
        link = nginx.link(server.link().token)
        loader = start_loader(link, workers=2, shared_memory=False, ca_file=str(nginx.ca_file), patience=60.0)
        trainer(net, Restarting(nginx)).train(server.source(), epochs=2)
        assert "connecting again" in loader.log
        server.close()  # while there is still a way to say so
        assert "exit code 0" in loader.wait()
    assert_same_weights(net, local_training())


def test_a_connection_on_which_nothing_is_to_be_said_stays(start_loader: StartLoader, tmp_path: Path) -> None:
    with (
        server_for("large", behind_proxy=True, settings=SETTINGS) as server,
        Nginx(tmp_path / "nginx", server.port, IDLE) as nginx,
    ):
        link = nginx.link(server.link().token)
        loader = start_loader(link, "large", shared_memory=False, ca_file=str(nginx.ca_file))
        batches = server.source().batches(0)
        seen = [next(batches)]
        time.sleep(IDLE + 1.5)  # all is sent that may be, and no step is taken
        assert fingerprint(seen + list(batches)) == local("large")
        assert "connecting again" not in loader.log


def test_faults_on_the_way_have_names(tmp_path: Path) -> None:
    with server_for("arrays", behind_proxy=True) as server, Nginx(tmp_path / "nginx", server.port, IDLE) as nginx:
        token, ca_file = server.link().token, str(nginx.ca_file)
        with pytest.raises(RefusedError, match=r"certificate of .* is not trusted .*feed\.ca_file"):
            open_link(nginx.link(token), 10.0)
        with pytest.raises(LostError, match="HTTP 404"):
            open_link(nginx.link(token, "/elsewhere"), 10.0, ca_file=ca_file)
        found = diagnose(nginx.link(token), seconds=0.2, ca_file=ca_file)
        assert found.ok, found.checks
        assert diagnose(nginx.link(token), seconds=0.2).checks[-1].name == "tls"
        server.close()
        with pytest.raises(LostError, match=r"HTTP 502.*nothing answers behind it"):
            open_link(nginx.link(token), 10.0, ca_file=ca_file)
        found = diagnose(nginx.link(token), seconds=0.2, ca_file=ca_file)
        assert found.checks[-1].name == "tunnel"
        assert "502" in found.checks[-1].text
