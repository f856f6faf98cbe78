"""The words after `--`."""

from __future__ import annotations

from pathlib import Path

import pytest

from distributed_training import DistributedTrainingError
from distributed_training.launch.program import python_arguments

COMMANDS = {"train", "predict"}


def test_commands_scripts_and_modules(in_tmp: Path) -> None:
    Path("mine.py").touch()
    assert python_arguments(["train", "a.yaml"], COMMANDS) == ["-m", "distributed_training", "train", "a.yaml"]
    assert python_arguments(["mine.py", "--x", "1"], COMMANDS) == ["mine.py", "--x", "1"]
    assert python_arguments(["-m", "mine", "1"], COMMANDS) == ["-m", "mine", "1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to launch"),
        (["-m"], "name of a module"),
        (["absent.py"], "absent.py: no such file"),
        (["trian"], "'trian' is no command of dtrain (predict, train)"),
    ],
)
def test_anything_else_is_refused(in_tmp: Path, words: list[str], said: str) -> None:
    with pytest.raises(DistributedTrainingError) as raised:
        python_arguments(words, COMMANDS)
    assert said in str(raised.value)
