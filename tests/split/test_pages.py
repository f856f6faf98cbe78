"""What the pages show of two machines, as two processes: their blocks and commands with addresses of this machine."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from tests.feed.tunnels.places import stand_in
from tests.launching import free_port
from tests.pages import Block, dtrain_commands, run_by
from tests.split.conftest import Side, Start

BEGIN = """
import os
import torch
from distributed_training import Config, ColabGPUTrainer, CPULoader, GPUTrainer, Trainer

class MyModel(torch.nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

model = MyModel()
dataset = (torch.arange(640.0).sin().reshape(160, 4), torch.arange(160) % 3)
held_out = (torch.arange(160.0).cos().reshape(40, 4), torch.arange(40) % 3)
"""
"""What the blocks take for granted."""
SIZES = {'device="cuda"': 'device="cpu"', "192.168.1.200": "127.0.0.1", "num_workers=8": "num_workers=2"}


def program(name: str, text: str, **changed: str) -> list[str]:
    """Write a program from a block, with what is other here, and give the words to start it."""
    for old, new in SIZES.items():
        text = text.replace(old, new)
    for old, new in changed.items():
        assert old in text, f"{old} is not in the block any more:\n{text}"
        text = text.replace(old, new)
    Path(name).write_text(BEGIN + re.sub(r"^[%!].*$", "", text, flags=re.MULTILINE))
    return [name]


def block_of(page: str, *, holding: str) -> Block:
    (found,) = [block for block in run_by(__file__, page) if holding in block.text]
    return found


@pytest.mark.parametrize("page", ["README.md", "split.md"])
def test_both_sides_of_a_training_in_python(page: str, start: Start) -> None:
    gpu, half, cpu = block_of(page, holding="GPUTrainer").text.partition("loader = CPULoader")
    port = str(free_port())
    link = {'"dtrain://..."': f'"dtrain://127.0.0.1:{port}"'}
    server, loader = start(
        program("gpu.py", gpu + "\nprint(trainer.trainer.cursor)", **{"29500": port}),
        program("cpu.py", half + cpu, **link, **{"epochs=10": "epochs=2"}),
    )
    assert "bottleneck" in server.end()
    assert "global_step=6" in server.screen
    assert "loaded " in loader.end()


def test_both_sides_of_validation_and_inference_in_python(start: Start) -> None:
    page = "validation-inference.md"
    gpu, cpu = block_of(page, holding="start_service").text, block_of(page, holding="run_validation").text
    saved = 'Trainer(model, run_dir="runs/NAME", device="cpu").train(dataset, epochs=1)\n'
    ports = {"validation": str(free_port()), "inference": str(free_port())}
    sides = []
    for mode, port in ports.items():
        own = {"29500": port, 'mode="validation"': f'mode="{mode}"'}
        sides += start(program(f"{mode}.py", (saved if mode == "validation" else "") + gpu, **own))
        sides[-1].until("waiting for clients")  # and the run is there for the next one
    client = cpu
    for port in ports.values():
        client = client.replace('"dtrain://..."', f'"dtrain://127.0.0.1:{port}"', 1)
    (loader,) = start(program("cpu.py", client + "\nprint(len(result['predictions']), 'predictions')"))
    assert "160 predictions" in loader.end()
    stopped(*sides)


def test_a_notebook_and_its_home(start: Start, in_tmp: Path) -> None:
    stand_in(in_tmp / "bin", "cloudflared")
    own = {"PATH": f"{in_tmp / 'bin'}:", "TRAINING_PORT": str(free_port()), "DTRAIN_TRAINING__DEVICE": "cpu"}
    lines = [f"os.environ[{key!r}] = {value!r} + os.environ.get({key!r}, '')\n" for key, value in own.items()]
    cells = block_of("colab.md", holding="ColabGPUTrainer").text
    (notebook,) = start(program("notebook.py", "".join(lines) + cells + "\nprint(result.status)"))
    notebook.until("dtrain+ws://")
    link = re.search(r"'(dtrain\+ws[^']+)'", notebook.screen)
    assert link
    text = block_of("colab.md", holding="CPULoader").text
    (home,) = start(program("home.py", text, LINK=repr(link[1]), **{"epochs=10": "epochs=2"}))
    assert "completed" in notebook.end()
    assert "loaded " in home.end()


def command(page: str, name: str, holding: str = "", **changed: str) -> list[str]:
    """The words of a command on a page, with what is other here."""
    found = [c.words for c in dtrain_commands() if c.block.page.name == page and c.words[0] == name]
    words = next(words for words in found if holding in " ".join(words))
    line = "\n".join(words)
    for old, new in changed.items():
        assert old in line, f"{old} is not in the command any more: {words}"
        line = line.replace(old, new)
    return line.split("\n")


def test_the_commands_of_a_split(start: Start) -> None:
    port = str(free_port())
    Path("config.yaml").write_text(
        f"training: {{epochs: 2, device: cpu}}\nnetwork: {{port: {port}}}\nrun: {{progress: plain, name: NAME}}\n"
    )
    (server,) = start(command("README.md", "serve", **{"network.gpu_host=192.168.1.100": "network.gpu_host=127.0.0.1"}))
    server.until("waiting for loaders")
    link = re.search(r"'(dtrain://[^']+)'", server.screen)
    assert link
    (doctor,) = start([*command("README.md", "doctor", LINK=link[1]), "--seconds", "0.1"])
    assert "ok  " in doctor.end()
    assert "FAIL" not in doctor.screen
    (loader,) = start(command("README.md", "feed", LINK=link[1], **{"\n8": "\n2"}))
    assert "Training completed (2 epochs, 46 steps" in server.end()
    assert "loaded " in loader.end()

    page = "validation-inference.md"
    (serving,) = start(command(page, "serve", "inference"))
    serving.until("waiting for clients")
    (client,) = start(command(page, "predict", **{"29500": port}))
    client.end()
    assert Path("predictions.parquet").stat().st_size > 1000, client.screen
    stopped(serving)
    (serving,) = start(
        command(page, "serve", "validation", **{"network.gpu_host=192.168.1.100": "network.gpu_host=127.0.0.1"})
    )
    serving.until("waiting for clients")
    (client,) = start(command(page, "validate", LINK=f"127.0.0.1:{port}"))
    assert "accuracy" in client.end()
    stopped(serving)


def stopped(*sides: Side) -> None:
    """End services, which else go on."""
    for side in sides:
        side.signal(signal.SIGTERM)
    for side in sides:
        side.end()
