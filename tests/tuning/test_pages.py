"""The blocks of the pages that need a Ray cluster, on a small one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.pages import Block, run_by
from tests.ray_nodes import Nodes

from distributed_training.launch.ray_cluster import connected


def run(block: Block, changed: dict[str, str], **names: Any) -> dict[str, Any]:
    """Run a block with other sizes; the names that it leaves."""
    text = block.text
    for old, new in changed.items():
        assert old in text, f"{old} is not in the block any more:\n{text}"
        text = text.replace(old, new)
    exec(compile("\n" * (block.line - 1) + text, str(block.page), "exec"), names)
    return names


def block_of(page: str, *, holding: str) -> Block:
    (found,) = [block for block in run_by(__file__, page) if holding in block.text]
    return found


def test_searches(nodes: Nodes, in_tmp: Path) -> None:
    def your_train_fn(config: Any) -> dict[str, float]:  # in here it travels whole: the nodes have no folder of tests
        return {"val_loss": (config["lr"] - 0.01) ** 2}

    with connected(nodes.address):
        few = {"num_samples=50": "num_samples=1"}
        ran = run(block_of("tuning.md", holding="your_train_fn"), few, your_train_fn=your_train_fn)
        assert "training.lr" in ran["best"]

        Path("config.yaml").write_text("training: {epochs: 1, batch_size: 256}\nrun: {progress: 'off'}\n")
        ran = run(block_of("tuning.md", holding="from_file"), {"num_samples=8": "num_samples=1"})
        assert len(ran["analysis"]) == 1
        assert not ran["analysis"].errors


def test_a_script_on_a_cluster(nodes: Nodes, in_tmp: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("my_script.py").write_text("import os, sys; print('rank', os.environ['RANK'], *sys.argv[1:], flush=True)\n")
    few = {"Workers(8, fewest=2, gpus=1)": "Workers(1, fewest=1, gpus=0)", '"auto"': repr(nodes.address)}
    ran = run(block_of("ray.md", holding="Workers"), few)

    assert ran["outcome"].code == 0
    assert "rank 0 --width 512" in "".join(capfd.readouterr())
