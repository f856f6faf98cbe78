"""What is run, and under which names its strategies go."""

from __future__ import annotations

import pytest

from distributed_training.runtime.errors import ConfigError
from distributed_training.strategies import Needs, needs
from distributed_training.verify.subject import Subject, read_variant


def test_settings_of_the_user_win_over_what_is_assumed_and_ours_win_over_theirs() -> None:
    subject = Subject("c.yaml", ["training.precision=bf16", "run.name=x"])
    program, variables = subject.command({"run.name": "run"})
    assert program[:3] == ["-m", "distributed_training.verify.child", "c.yaml"]
    assert program.index("training.precision=fp32") < program.index("training.precision=bf16")
    assert program.index("run.name=x") < program.index("run.name=run")
    assert variables == {}


def test_a_program_gets_settings_by_the_environment() -> None:
    program, variables = Subject("c.yaml", ["model=gpt"], ["train.py", "--x"]).command({"strategy.name": "ddp"})
    assert program == ["train.py", "--x"]
    assert variables["DTRAIN_CONFIG"] == "c.yaml"
    assert variables["DTRAIN_MODEL"] == "gpt"
    assert variables["DTRAIN_STRATEGY__NAME"] == "ddp"


def test_variants() -> None:
    assert read_variant("ddp").settings == {"strategy.name": "ddp"}
    assert read_variant("ddp+powersgd").settings["strategy.compression"] == "powersgd"
    both = read_variant("ddp+fp16+bucket_mb=1")
    assert both.label == "ddp+fp16+bucket_mb=1"
    assert both.settings == {"strategy.name": "ddp", "strategy.compression": "fp16", "strategy.bucket_mb": "1"}
    with pytest.raises(ConfigError, match=r"'zero4' is unknown.*did you mean zero"):
        read_variant("zero4")


def test_whether_a_library_is_there() -> None:
    assert needs("ddp") == Needs(None, "", "torchrun")
    assert needs("ddp").installed
    assert Needs("json.decoder").installed
    assert not Needs("no_such_library").installed
    assert not Needs("no_such_library.torch").installed
    assert needs("horovod").launcher == "horovodrun"
    assert needs("single").launcher == "none"
