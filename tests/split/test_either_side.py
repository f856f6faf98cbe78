"""The loader listens and the GPU side dials: `dtrain feed --listen`, `dtrain serve --connect`, the same in Python."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from tests.feed.nginx import Nginx
from tests.launching import free_port
from tests.split.conftest import Side, Start, assert_same, slow_loading, train_here, wait_for, weights_of
from tests.split.test_serve_and_feed import COMMON, words

from distributed_training import Config, CPULoader, GPUTrainer
from distributed_training.feed.pairing import PairingLink
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.split.listening import links_to
from distributed_training.verify.audit import audit

GPU = """
import os
import sys
import torch
from distributed_training import ColabGPUTrainer

os.environ["DTRAIN_FEED__CA_FILE"] = sys.argv[2]

torch.manual_seed(0)
trainer = ColabGPUTrainer(device="cpu")
trainer.setup_model(torch.nn.Linear(10, 3), learning_rate=1e-2, run_dir="run")
print(trainer.connect(sys.argv[1]).status)
"""
CPU = """
import sys
import torch
from distributed_training import CPULoader

loader = CPULoader(num_workers=2)
loader.setup_dataset((torch.arange(2000.0).sin().reshape(200, 10), torch.arange(200) % 3), batch_size=32)
loader.listen_for_gpu(port=int(sys.argv[1]), epochs=3, tunnel=sys.argv[2])
"""


def link_of(loader: Side) -> str:
    """What a loader that listens prints."""
    loader.until("--connect '")
    wait_for(lambda: loader.screen.partition("--connect '")[2].count("'") > 0, lambda: loader.screen)
    return loader.screen.partition("--connect '")[2].partition("'")[0]


def test_the_training_is_that_of_one_machine_though_the_gpu_side_is_killed(start: Start) -> None:
    with slow_loading() as slowly:
        training = ["training.epochs=8", slowly]
        own = words(free_port(), *training, "checkpoint.every_steps=10", "run.name=fed", "feed.shared_memory=false")
        own.append("feed.checkpoints_home=off")
        (loader,) = start(["feed", *own, "--listen", "--workers=2", "network.cpu_host=0.0.0.0"])
        link = PairingLink.parse(link_of(loader))
        assert link.carrier == "ws"
        assert link.fingerprint is not None
        to = str(PairingLink("127.0.0.1", link.port, link.token, link.fingerprint, "ws"))
        (server,) = start(["serve", *own, "--connect", to])
        wait_for(lambda: len(list(Path("runs/fed/checkpoints").glob("step-*"))) > 1, lambda: server.screen)
        server.signal(signal.SIGKILL)
        server.end()
    (server,) = start(["serve", "--resume", "auto", "--connect", to])
    said = server.end()
    assert "calling the loader at 127.0.0.1" in said
    assert "Training completed" in said
    assert "loaded " in loader.end()
    train_here(*COMMON, *training, "run.name=here")
    assert_same(weights_of("runs/fed"), weights_of("runs/here"))
    proof = audit(RunDirectory(Path("runs/fed")))
    assert (proof.problem, proof.resumes) == ("", 1)


def test_from_python_with_a_tunnel_to_the_loader(start: Start, in_tmp: Path) -> None:
    (in_tmp / "gpu.py").write_text(GPU)
    (in_tmp / "cpu.py").write_text(CPU)
    port = free_port()
    with Nginx(in_tmp / "nginx", port, 60) as nginx:
        (loader,) = start(["cpu.py", str(port), f"https://127.0.0.1:{nginx.port}/feed"])
        link = link_of(loader)
        assert link.startswith("dtrain+wss://")
        assert link.endswith(f"@127.0.0.1:{nginx.port}/feed")
        (gpu,) = start(["gpu.py", link, str(nginx.ca_file)])
        assert "completed" in gpu.end()
        loader.end()
    assert audit(RunDirectory(Path("run"))).epochs == 3


def test_the_link_of_a_gpu_side_is_none_of_a_loader() -> None:
    with pytest.raises(ConfigError, match="is not the link of a loader that listens"):
        GPUTrainer(device="cpu").connect("dtrain://127.0.0.1:29500")


def test_port_443_and_addresses_of_the_web_mean_a_tunnel() -> None:
    config, token = Config(), bytes(range(24))
    tunnel = PairingLink("abc123.ngrok.io", 443, token, carrier="ws")
    assert links_to("abc123.ngrok.io", 443, token, config) == [tunnel]
    assert links_to("https://abc123.ngrok.io", None, token, config) == [tunnel]
    assert links_to("wss://abc123.ngrok.io:443/", None, token, config) == [tunnel]
    assert links_to(str(tunnel), None, None, config) == [tunnel]
    assert links_to("192.168.1.100", 29500, token, config)[0].carrier == "tcp"
    loader = CPULoader(1)
    loader.setup_dataset((torch.zeros(4, 1), torch.zeros(4)), batch_size=2)
    with pytest.raises(ConfigError, match=r"has not a token.*token="):
        loader.start_loading(gpu_host="abc123.ngrok.io", gpu_port=443)
