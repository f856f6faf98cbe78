"""`best.yaml` is a config of its own that `dtrain train` takes as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from distributed_training.config import Config, load_config
from distributed_training.runtime.errors import ConfigError, RunDirectoryError
from distributed_training.tuning.best import write_best


def test_it_is_the_base_with_the_parameters_and_without_the_search(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "training": {"epochs": 7, "lr": 0.5},
        "model": {"name": "mlp", "args": {"hidden": [16], "dropout": 0.1}},
        "run": {"name": "the-search", "root": str(tmp_path)},
        "tuning": {"space": {"training.lr": {"uniform": [0.1, 1.0]}}, "samples": 3},
    }
    base = Config.from_dict(values)
    file = write_best(tmp_path, base, {"training.lr": 0.25, "model.args.hidden": [32, 32]}, "trial 7\nval_loss 0.1")
    assert file == tmp_path / "best.yaml"
    text = file.read_text()
    assert text.startswith("# trial 7\n# val_loss 0.1\n")
    assert "tuning" not in yaml.safe_load(text)
    found = load_config(file, environ={})
    assert (found.training.lr, found.training.epochs, found.run.name) == (0.25, 7, None)
    assert found.model.args == {"hidden": [32, 32], "dropout": 0.1}
    without = {
        key: value for key, value in found.to_dict().items() if key not in ("training", "model", "run", "tuning")
    }
    assert without == {key: value for key, value in base.to_dict().items() if key in without}
    assert [path.name for path in tmp_path.iterdir()] == ["best.yaml"]


def test_the_settings_of_a_function_stay_as_they_are(tmp_path: Path) -> None:
    file = write_best(tmp_path, {"depth": 3, "lr": 1.0}, {"lr": 0.1, "a.b": "${x}"})
    assert yaml.safe_load(file.read_text().replace("\\${", "${")) == {"depth": 3, "lr": 0.1, "a.b": "${x}"}


def test_parameters_that_make_no_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"training\.batch_size"):
        write_best(tmp_path, Config(), {"training.batch_size": -1})
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"best\.yaml: cannot be written"):
        write_best(tmp_path / "gone", Config(), {})
