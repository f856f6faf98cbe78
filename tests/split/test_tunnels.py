"""A whole training through a tunnel that is cut in the midst of it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
import torch
from tests.feed.tunnels.places import ssh_server, stand_in
from tests.launching import ROOT, free_port
from tests.split.conftest import Side, Start, assert_same, wait_for, weights_of
from torch import Tensor

from distributed_training import ColabGPUTrainer, Config, Trainer
from distributed_training.feed.pairing import PairingLink
from distributed_training.runtime.errors import ConfigError
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.split.tunnelling import Tunnelling
from distributed_training.verify.audit import audit

MODEL = """
import os, sys
import torch
from distributed_training import Callback, ColabGPUTrainer
from distributed_training.feed.tunnels import SshTunnel

class Loud(Callback):
    def on_step_end(self, trainer, step, loss):
        print("step", trainer.cursor.global_step, flush=True)

os.environ["DTRAIN_FEED__SHARED_MEMORY"] = "false"  # all goes through the tunnel
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
trainer = ColabGPUTrainer(port=int(sys.argv[1]), device="cpu")
trainer.setup_model(model, learning_rate=1e-2, run_dir="run", callbacks=[Loud()])
result = trainer.start_training_with_tunnel(eval(sys.argv[2]))
print(result.status, result.steps)
"""
DATA = """
import os, sys, time
import torch
from distributed_training import CPULoader

calls = 0
def first_some_then_a_pause(sample):
    global calls
    calls += 1
    while calls > 40 and not os.path.exists("go"):
        time.sleep(0.02)
    return sample

data = (torch.arange(2000.0).sin().reshape(200, 10), torch.arange(200) % 3)
loader = CPULoader(num_workers=2)
loader.setup_dataset(data, batch_size=32, shuffle=True, preprocess=first_some_then_a_pause)
done = loader.start_loading(sys.argv[1], epochs=4)
print("batches", done.batches)
"""


@pytest.fixture
def programs(in_tmp: Path) -> Path:
    (in_tmp / "gpu.py").write_text(MODEL)
    (in_tmp / "cpu.py").write_text(DATA)
    return in_tmp


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Tensor]:
    """The weights of the same training with the data at hand."""
    torch.manual_seed(0)
    layers = (torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
    model = torch.nn.Sequential(*layers)
    data = (torch.arange(2000.0).sin().reshape(200, 10), torch.arange(200) % 3)
    training = {"lr": 1e-2, "batch_size": 32, "schedule": "constant", "warmup_epochs": 0}
    config = Config.from_dict({"training": training, "run": {"progress": "off"}})
    trainer = Trainer(model, device="cpu", config=config, run_dir=False)
    trainer.train(data, epochs=4)
    trainer.close()
    return model.state_dict()


def links(side: Side, count: int = 1) -> list[str]:
    """The links that a GPU side has printed, once there are so many."""

    def found() -> list[str]:
        return re.findall(r"waiting for loaders: .*'(dtrain[^']+)'\n", side.screen)

    wait_for(lambda: len(found()) >= count, lambda: side.screen)
    return found()


def agent_of(side: Side, name: str) -> psutil.Process:
    """The program that makes its tunnel."""
    children = psutil.Process(side.pid).children(recursive=True)
    (agent,) = [child for child in children if any(name in word for word in child.cmdline()[:3])]
    return agent


def test_the_tunnel_comes_back_elsewhere_and_the_loader_gets_the_new_link(
    start: Start, programs: Path, undisturbed: dict[str, Tensor]
) -> None:
    program = stand_in(programs / "bin", "cloudflared")
    (gpu,) = start(["gpu.py", str(free_port()), repr(f"cloudflared:{program}")])
    (old,) = links(gpu)
    link = PairingLink.parse(old)
    assert link.carrier == "ws"
    assert f"host 127.0.0.1, port {link.port}, token " in gpu.screen
    (cpu,) = start(["cpu.py", old])
    gpu.until("step 1\n")
    agent_of(gpu, program).kill()
    new = links(gpu, 2)[1]
    assert new != old
    assert PairingLink.parse(new).token == link.token
    assert "start the same command with the new link" in gpu.screen
    cpu.signal(signal.SIGKILL)
    Path("go").touch()
    (cpu,) = start(["cpu.py", new])
    gpu.until("completed 28")
    cpu.until("batches ")
    assert_same(weights_of("run"), undisturbed)
    assert audit(RunDirectory(Path("run"))).problem == ""


def test_over_ssh_the_port_stays_and_the_loader_comes_back_by_itself(
    start: Start, programs: Path, undisturbed: dict[str, Tensor]
) -> None:
    with ssh_server(programs / "keys") as (destination, ssh):
        (gpu,) = start(["gpu.py", str(free_port()), f"SshTunnel({destination!r}, {ssh!r})"])
        (link,) = links(gpu)
        assert PairingLink.parse(link).fingerprint is not None  # TLS of our own, from end to end
        (cpu,) = start(["cpu.py", link])
        gpu.until("step 1\n")
        agent_of(gpu, "ssh").kill()
        gpu.until("the tunnel is down, opening it again")
        Path("go").touch()
        gpu.until("completed 28")
        cpu.until("batches ")
    assert_same(weights_of("run"), undisturbed)


def test_serve_with_a_tunnel(start: Start, in_tmp: Path) -> None:
    program = stand_in(in_tmp / "bin", "cloudflared")
    words = [f"network.port={free_port()}", "training.epochs=1", "training.batch_size=512", "run.name=tunnelled"]
    (gpu,) = start(["serve", *words, "--tunnel", f"cloudflared:{program}"])
    (link,) = links(gpu)
    agent = agent_of(gpu, program)
    (cpu,) = start(["feed", *words, "--workers", "1", "--to", link])
    gpu.until("Training completed (1 epochs")
    cpu.until("loaded ")
    wait_for(lambda: not agent.is_running(), lambda: "the program outlives the training")
    for mode, command in (("validation", ["validate", "--json"]), ("inference", ["predict"])):
        (gpu,) = start(["serve", "runs/tunnelled", "--mode", mode, "--tunnel", f"cloudflared:{program}"])
        gpu.until("--to '")
        wait_for(lambda: gpu.screen.partition("--to '")[2].count("'") > 0, lambda: gpu.screen)  # noqa: B023
        link = gpu.screen.partition("--to '")[2].partition("'")[0]
        assert link.startswith("dtrain+ws")
        (client,) = start([*command[:1], "runs/tunnelled", *command[1:], "--to", link])
        said = client.end()
        assert ('"total_samples": 359' if mode == "validation" else "\n358,") in said, said
        gpu.signal(signal.SIGINT)
        gpu.end()


def test_the_notebook_s_code_and_its_home_side_work_as_they_are(start: Start, in_tmp: Path) -> None:
    examples = ROOT / "examples"
    cells = [
        cell for cell in json.loads((examples / "colab.ipynb").read_text())["cells"] if cell["cell_type"] == "code"
    ]
    program = stand_in(in_tmp / "bin", "cloudflared")
    path = f"import os\nos.environ['PATH'] = {os.path.dirname(program)!r} + ':' + os.environ['PATH']\n"
    port = f"os.environ['TRAINING_PORT'] = '{free_port()}'\n"
    model, train = ("".join(cell["source"]) + "\n" for cell in cells[1:])
    said = "print(result.status, result.steps, flush=True)\n"
    (in_tmp / "gpu.py").write_text(path + port + model + (train + said) * 2)
    (gpu,) = start(["gpu.py"])
    for number in (1, 2):  # what is complete is not gone on with: the second time is a training of its own
        link = links(gpu, number)[-1]
        (cpu,) = start([str(examples / "colab_home.py"), link, "--epochs=2", "--samples=640"])
        cpu.until("loaded ")
    wait_for(lambda: gpu.screen.count("completed 16\n") == 2, lambda: gpu.screen)
    assert gpu.screen.count("tunnel: cloudflared, since it is installed and needs no account\n") == 2
    assert len(list(Path("runs").glob("*/checkpoints"))) == 2


def test_mistakes_are_said_before_anything_is_opened() -> None:
    with pytest.raises(ConfigError, match="call setup_model"):
        ColabGPUTrainer(device="cpu").start_training_with_tunnel()
    with pytest.raises(ConfigError, match="cpu_host"):
        Tunnelling("https://name.example").address(29500, allow=["192.168.1.2"])
    with pytest.raises(ConfigError, match="tunnel='pigeon' is none of"):
        Tunnelling("pigeon")
