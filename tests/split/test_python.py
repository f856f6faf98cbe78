"""`GPUTrainer` and `CPULoader` in two programs."""

from __future__ import annotations

import secrets
import signal
from pathlib import Path

import pytest
import torch
from tests.launching import free_port
from tests.split.conftest import Start, assert_same, weights_of

from distributed_training import Config, CPULoader, GPUTrainer, Trainer
from distributed_training.feed.pairing import PairingLink, encode_token
from distributed_training.runtime.errors import ConfigError, DataError
from distributed_training.runtime.run_directory import RunDirectory
from distributed_training.verify.audit import audit

GPU = """
import sys
import torch
from distributed_training import GPUTrainer

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
trainer = GPUTrainer(port=int(sys.argv[1]), device="cpu", **eval(sys.argv[2]))
trainer.setup_model(model, learning_rate=1e-2, run_dir="run")
result = trainer.start_training(**eval(sys.argv[3]))
print(result.status, result.epochs, result.steps, sorted(result.metrics))
"""
CPU = """
import sys
import torch
from distributed_training import CPULoader

data = (torch.arange(2000.0).sin().reshape(200, 10), torch.arange(200) % 3)
loader = CPULoader(num_workers=2)
loader.setup_dataset(data, batch_size=32, shuffle=True, val_dataset=(data[0][:50], data[1][:50]))
done = loader.start_loading(gpu_host=sys.argv[1], gpu_port=int(sys.argv[2]), epochs=4, **eval(sys.argv[3]))
print("batches", done.batches)
"""


@pytest.fixture
def programs(in_tmp: Path) -> Path:
    (in_tmp / "gpu.py").write_text(GPU)
    (in_tmp / "cpu.py").write_text(CPU)
    return in_tmp


def test_the_loader_says_what_and_how_long_to_train(start: Start, programs: Path) -> None:
    port = str(free_port())
    gpu, cpu = start(["gpu.py", port, "{}", "{}"], ["cpu.py", "127.0.0.1", port, "{}"])
    said = gpu.end()
    assert "completed 4 28 [" in said
    assert "val_accuracy" in said
    assert "bottleneck" in said
    assert "batches " in cpu.end()
    assert audit(RunDirectory(Path("run"))).problem == ""

    torch.manual_seed(0)
    layers = (torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
    model = torch.nn.Sequential(*layers)
    data = (torch.arange(2000.0).sin().reshape(200, 10), torch.arange(200) % 3)
    training = {"lr": 1e-2, "batch_size": 32, "schedule": "constant", "warmup_epochs": 0}
    config = Config.from_dict({"training": training, "run": {"progress": "off"}})
    trainer = Trainer(model, device="cpu", config=config, run_dir=False)
    trainer.train(data, epochs=4)
    trainer.close()
    assert_same(weights_of("run"), model.state_dict())


def test_off_this_machine_the_link_or_the_token_is_needed(start: Start, programs: Path) -> None:
    token, port = secrets.token_urlsafe(24), str(free_port())
    gpu, cpu = start(
        ["gpu.py", port, f"dict(host='0.0.0.0', token={token!r})", "{}"],
        ["cpu.py", "127.0.0.1", port, "{}"],  # no token
    )
    cpu.until("take the whole pairing link that it prints")
    cpu.signal(signal.SIGKILL)
    link = PairingLink.parse(gpu.screen.partition("'")[2].partition("'")[0])
    assert encode_token(link.token or b"") == token
    assert link.fingerprint is not None
    # A name that is not known to be this machine's: over TLS, and the token alone proves who is who.
    (cpu,) = start(["cpu.py", "LOCALHOST", port, f"dict(token={token!r})"])
    assert "completed 4 28 [" in gpu.end()
    assert "batches " in cpu.end()


def test_only_the_cpu_host_may_connect(start: Start, programs: Path) -> None:
    port = str(free_port())
    gpu, cpu = start(
        ["gpu.py", port, "dict(host='127.0.0.1')", "dict(cpu_host='127.0.0.2')"], ["cpu.py", "127.0.0.1", port, "{}"]
    )
    gpu.until("refused a connection from 127.0.0.1")
    assert "only 127.0.0.2 may connect to this run" in gpu.screen
    for side in (cpu, gpu):
        side.signal(signal.SIGKILL)


def test_mistakes_are_said_before_anything_waits() -> None:
    with pytest.raises(ConfigError, match="call setup_model"):
        GPUTrainer(device="cpu").start_training()
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="learning_rate or optimizer, not both"):
        GPUTrainer(device="cpu").setup_model(model, 0.1, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(ConfigError, match="call setup_dataset"):
        CPULoader(num_workers=1).start_loading("127.0.0.1", 1)
    with pytest.raises(ConfigError, match="at least one worker"):
        CPULoader(num_workers=0)
    with pytest.raises(DataError, match="can only be iterated"):
        CPULoader(num_workers=1).setup_dataset(iter([1, 2]))
    loader = CPULoader(num_workers=1)
    loader.setup_dataset(torch.zeros(8, 2), batch_size=4)
    with pytest.raises(ConfigError, match="has not a token"):
        loader.start_loading("192.0.2.1", 29500)
