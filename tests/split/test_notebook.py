"""`examples/colab.ipynb` in a real kernel: stopped by its button, gone on, its kernel killed, gone on in a new one."""

from __future__ import annotations

import os
import re
import signal
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from nbclient.exceptions import DeadKernelError
from tests.feed.tunnels.places import stand_in
from tests.launching import ROOT, free_port
from tests.split.conftest import Side, Start, assert_same, wait_for, weights_of
from tests.split.notebooks import Notebook
from torch import Tensor

from distributed_training import Config, Trainer

LINK = r"waiting for loaders: .*'(dtrain\+ws[^']+)'"
FILE = ROOT / "examples" / "colab.ipynb"
HOME = """
import os, sys, time
import torch
from distributed_training import Config, CPULoader

calls = 0
def in_three_parts(sample):
    global calls
    calls += 1
    while calls > 100 and not os.path.exists("go-1") or calls > 300 and not os.path.exists("go-2"):
        time.sleep(0.02)
    return sample

data = (torch.arange(1280.0).sin().reshape(640, 2), torch.arange(640) % 3)
loader = CPULoader(num_workers=2, config=Config.from_dict({"feed": {"checkpoints_home": "on"}}))
loader.setup_dataset(data, batch_size=64, preprocess=in_three_parts)
loader.start_loading(sys.argv[1], epochs=4)
"""


SCREENS = """
from distributed_training.feed.loader import LoaderFigures
from distributed_training.split.screen import LoaderScreen
from distributed_training.split.seen import sample_progress

with sample_progress("auto") as seen:
    seen(2560, 2560)
screen = LoaderScreen("auto", steps=20, samples=64, workers=2, epochs=4)
screen(LoaderFigures(workers=2, connected=2, batches=100, bytes=5_000_000, loading=1.0, restarts=0, epoch=1, step=7))
"""


def undisturbed(source: str) -> dict[str, Tensor]:
    """The weights of the notebook's model after a training with the data at hand."""
    names: dict = {}
    exec(source, names)
    training = {"lr": 5e-3, "batch_size": 64, "schedule": "constant", "warmup_epochs": 0}
    config = Config.from_dict({"training": training, "run": {"progress": "off"}})
    trainer = Trainer(names["model"], device="cpu", config=config, run_dir=False)
    trainer.train((torch.arange(1280.0).sin().reshape(640, 2), torch.arange(640) % 3), epochs=4)
    trainer.close()
    return dict(names["model"].state_dict())


@pytest.fixture
def variables(in_tmp: Path) -> dict[str, str]:
    """The environment of a kernel: a `cloudflared` of ours, a port of its own, no files outside the test's folder."""
    stand_in(in_tmp / "bin", "cloudflared")
    return {
        "PATH": f"{in_tmp / 'bin'}:{os.environ['PATH']}",
        "TRAINING_PORT": str(free_port()),
        "DTRAIN_TRAINING__DEVICE": "cpu",
        "DTRAIN_FEED__SHARED_MEMORY": "false",  # all goes through the tunnel,
        "DTRAIN_FEED__CHECKPOINTS_HOME": "on",  # as from another machine
        "IPYTHONDIR": str(in_tmp / "ipython"),
    }


def test_stop_button_and_killed_kernel(
    start: Start, in_tmp: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(in_tmp / "jupyter"))
    (in_tmp / "home.py").write_text(HOME)
    first, second = (Notebook(FILE, _machine(name), variables) for name in ("one", "two"))  # no file in common
    with closing(first), closing(second):
        for notebook in (first, second):
            notebook.press_run(2)
        first.wait_until_done()
        link, home, saved = _stopped_and_killed(first, start)
        home.signal(signal.SIGKILL)
        Path("go-2").touch()
        second.wait_until_done()
        home = _cut_off_and_completed(second, start, link)
        assert _first_step(second) >= saved  # the loader has brought the checkpoint along
        second.press_run(second.add(SCREENS))
        second.wait_until_done()
        assert "2,560 samples" in second.shown(4)
        assert "loading, epoch 2/4" in second.shown(4)
    home.until("at home: ")
    (run,) = Path("machine-two", "runs").glob("[a-z]*")
    weights = undisturbed(second.source(2))
    assert_same(weights_of(run), weights)
    (run,) = Path("runs").glob("home-*")
    assert_same(weights_of(run), weights)  # and they have come home


def _stopped_and_killed(notebook: Notebook, start: Start) -> tuple[str, Side, int]:
    """(link, loader, step at which the stop button was pressed) of a kernel that is no more."""
    notebook.press_run(3)
    link = notebook.until(3, LINK)[1]
    (home,) = start(["home.py", link])
    notebook.until(3, r"<progress value=\"\d+\" max=\"40\".*step [1-9]\d*/40")
    notebook.press_stop()
    notebook.wait_until_done()  # the cell ends as if it were done: there is no traceback
    assert "interrupted" in notebook.shown(3)
    saved = int(re.findall(r"step (\d+)/40", notebook.shown(3))[-1])

    Path("go-1").touch()
    notebook.press_run(3)  # and the loader, which still runs, finds it under the same link
    assert notebook.until(3, LINK)[1] == link
    wait_for(lambda: _step(notebook) > saved, lambda: f"{notebook.shown(3)}\n{home.screen}")
    agent = _tunnel(notebook)
    os.kill(notebook.pid, signal.SIGKILL)
    with pytest.raises(DeadKernelError):
        notebook.wait_until_done()
    wait_for(lambda: not agent.is_running(), lambda: "the tunnel outlives the kernel")
    return link, home, saved


def _cut_off_and_completed(notebook: Notebook, start: Start, old: str) -> Side:
    """The loader of a training that came to its end though its tunnel was cut."""
    notebook.press_run(3)
    link = notebook.until(3, LINK)[1]
    assert link != old
    _tunnel(notebook).kill()
    notebook.until(3, r"start the same command with the new link")
    (home,) = start(["home.py", notebook.until(3, rf"(?s){re.escape(link)}.*{LINK}")[1]])
    notebook.wait_until_done()
    assert "epoch 4/4" in notebook.shown(3)
    assert "completed" in notebook.shown(3)
    return home


def _tunnel(notebook: Notebook) -> psutil.Process:
    (agent,) = [child for child in psutil.Process(notebook.pid).children() if "cloudflared" in str(child.cmdline())]
    return agent


def _machine(name: str) -> Path:
    folder = Path(f"machine-{name}").absolute()
    folder.mkdir()
    return folder


def _first_step(notebook: Notebook) -> int:
    """Where the training began that is shown below the cell."""
    found = re.search(r"going on from step (\d+)", notebook.shown(3))
    return int(found[1]) if found else 0


def _step(notebook: Notebook) -> int:
    return max([int(step) for step in re.findall(r"step (\d+)/40", notebook.shown(3))], default=0)
