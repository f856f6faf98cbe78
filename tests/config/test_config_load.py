"""Layers: defaults < file < .env < environment < command line, and an error that says which one is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed_training.config import Config, ConfigError, get_config, load_config
from distributed_training.config.load import export_dotenv, read_dotenv

Write = Callable[..., str]


def test_defaults_without_any_file() -> None:
    assert get_config() == Config()


def test_layers_in_order(write: Write) -> None:
    file = write("training: {epochs: 2, batch_size: 2, seed: 2, log_every: 2}")
    write("DTRAIN_TRAINING__BATCH_SIZE=3\nDTRAIN_TRAINING__SEED=3\nDTRAIN_TRAINING__LOG_EVERY=3", ".env")
    environ = {"DTRAIN_TRAINING__SEED": "4", "DTRAIN_TRAINING__LOG_EVERY": "4"}
    config = load_config(file, ["training.log_every=5"], environ=environ)
    keys = ["max_nonfinite_steps", "epochs", "batch_size", "seed", "log_every"]  # one for each layer to win
    assert [config.get(f"training.{key}") for key in keys] == [5, 2, 3, 4, 5]
    sources = [origin.source for origin in config.origins("training.log_every")]
    assert sources == [
        "default",
        "config.yaml",
        ".env: DTRAIN_TRAINING__LOG_EVERY",
        "environment: DTRAIN_TRAINING__LOG_EVERY",
        "command line",
    ]
    assert [origin.value for origin in config.origins("training.log_every")] == [10, 2, 3, 4, 5]


NAMED = {
    "GPU_HOST": ("10.0.0.1", "network.gpu_host", "10.0.0.1"),
    "CPU_HOST": ("10.0.0.2", "network.cpu_host", "10.0.0.2"),
    "TRAINING_PORT": ("29501", "network.port", 29501),
    "BATCH_SIZE": ("128", "training.batch_size", 128),
    "DTRAIN_TRAINING__LR": ("1e-3", "training.lr", 1e-3),
    "DTRAIN_TRAINING__LEARNING_RATE": ("1e-3", "training.lr", 1e-3),
    "DTRAIN_STRATEGY": ("single", "strategy.name", "single"),
    "DTRAIN_DATA__AUGMENT__FLIP": ("true", "data.augment.flip", True),
    "DTRAIN_MODEL__ARGS__HIDDEN": ("[8, 8]", "model.args.hidden", [8, 8]),
    "DTRAIN_RUN__NAME": ("1e3", "run.name", "1e3"),
}


@pytest.mark.parametrize("name", NAMED)
def test_variable_from_environment_and_dotenv(name: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    text, key, value = NAMED[name]
    write(f"{name}={text}", ".env")
    assert get_config().get(key) == value
    Path(".env").unlink()
    monkeypatch.setenv(name, text)
    assert get_config().get(key) == value


def test_get_config_finds_its_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("training: {epochs: 2}")
    write("training: {epochs: 3}", "other.yaml")
    assert get_config().training.epochs == 2
    monkeypatch.setenv("DTRAIN_CONFIG", "other.yaml")
    assert get_config().training.epochs == 3
    assert get_config("config.yaml").training.epochs == 2
    monkeypatch.setenv("DTRAIN_CONFIG", "")
    assert get_config().training.epochs == 2


def test_from_file_takes_overrides(write: Write) -> None:
    config = Config.from_file(write("training: {epochs: 2}"), ["training.epochs=4", "model=resnet18", "data.root=a=b"])
    assert (config.training.epochs, config.model.name, config.data.root) == (4, "resnet18", "a=b")


def test_learning_rate_is_an_alias_in_every_layer(write: Write) -> None:
    file = write("training: {learning_rate: 0.5}")
    assert load_config(file).training.lr == 0.5
    assert load_config(file, ["training.lr=0.25"]).training.lr == 0.25
    assert load_config(file, ["training.learning_rate=0.25"]).training.lr == 0.25
    assert load_config(file).origins("training.learning_rate")[-1].source == "config.yaml"


def test_interpolation(write: Write) -> None:
    text = "training: {epochs: 8, warmup_epochs: '${training.epochs}'}\nrun: {name: 'seed-${training.seed}'}"
    config = load_config(write(text))
    assert config.training.warmup_epochs == 8.0
    assert config.run.name == "seed-0"  # a default can be referred to as well
    assert load_config("config.yaml", ["training.epochs=4"]).training.warmup_epochs == 4.0


@pytest.mark.parametrize(
    "text", ["", "# nothing", "training:", "training: {}", "data: {augment: }", "data: {augment: {}}"]
)
def test_empty_sections_are_fine(write: Write, text: str) -> None:
    assert load_config(write(text)) == Config()


def test_shorthand_for_sections_with_a_name(write: Write) -> None:
    config = load_config(write("strategy: single\nmodel: gpt"))
    assert (config.strategy.name, config.model.name) == ("single", "gpt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training: {epocs: 3}", "unknown setting training.epocs; did you mean training.epochs?"),
        ("trainning: {epochs: 3}", "unknown setting trainning.epochs; did you mean training.epochs?"),
        ("epochs: 3", "unknown setting epochs; did you mean training.epochs?"),
        ("zzz: 3", "unknown setting zzz; the sections are model, training,"),
        ("training: {batch: {size: 3}}", "unknown setting training.batch.size; did you mean training.batch_size?"),
        ("data: {augment: {flp: true}}", "unknown setting data.augment.flp; did you mean data.augment.flip?"),
        ("training: {lr: {a: 1}}", "unknown setting training.lr.a; did you mean training.lr?"),
        ("training: 5", "training must be a section with keys, not 5"),
        ("data: {augment: 5}", "data.augment must be a section with keys, not 5"),
        ("training: {epochs: many}", "training.epochs='many' must be a whole number, not str"),
        ("training: {epochs: 0}", "training.epochs=0 must be at least 1"),
        ("training: {lr: }", "training.lr=None must be a number"),
        ("training: {precision: bf61}", "training.precision='bf61' must be one of"),
        ("data: {augment: {mean: [a]}}", "data.augment.mean[0]='a' must be a number"),
        ("model: {args: 5}", "model.args=5 must be a mapping"),
        ("training: {lr: 1, learning_rate: 2}", "training.lr is given under two names; keep one"),
        ("training: {learning_rate: 1, lr: 2}", "training.lr is given under two names; keep one"),
        ("training: {lr: 1, lr: 2}", "not valid YAML"),
        ("a: [1\nb: 2", "not valid YAML"),
        ("[1, 2]", "must hold sections"),
        ("training: {lr: '${foo'}", "training.lr: no viable alternative"),
        (
            "training: {lr: '${training.epocs}'}",
            "training.lr: Interpolation key 'training.epocs' not found; did you mean training.epochs?",
        ),
    ],
)
def test_error_names_file_and_key_in_one_line(write: Write, text: str, message: str) -> None:
    file = write(text, "bad.yaml")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["training.seed=1"])  # a layer after the wrong one must not be blamed
    assert str(caught.value).startswith(f"bad.yaml: {message}")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("BATCH_SIZE", "many", "BATCH_SIZE: training.batch_size='many' must be a whole number"),
        ("TRAINING_PORT", "0", "TRAINING_PORT: network.port=0 must be between 1 and 65535"),
        (
            "DTRAIN_TRAINING__EPOCS",
            "1",
            "DTRAIN_TRAINING__EPOCS: unknown setting training.epocs; did you mean training.e",
        ),
        (
            "DTRAIN_TRAINING_EPOCHS",
            "1",
            "DTRAIN_TRAINING_EPOCHS is not a setting; they are named DTRAIN_SECTION__KEY; did you",
        ),
        ("DTRAIN_FOO", "1", "DTRAIN_FOO is not a setting"),
        ("GPU_HOST", "${x", "GPU_HOST: network.gpu_host: no viable alternative"),
    ],
)
def test_error_names_the_variable(write: Write, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={name: text})
    assert str(caught.value).startswith(f"environment: {message}")
    write(f"{name}={text}", ".env")
    with pytest.raises(ConfigError) as caught:
        load_config(environ={})
    assert str(caught.value).startswith(f".env: {message}")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("training.epochs", "command line: 'training.epochs' is not key=value"),
        ("=3", "command line: '=3' is not key=value"),
        ("training.epocs=3", "command line: unknown setting training.epocs; did you mean training.epochs?"),
        ("training.epochs=x", "command line: training.epochs='x' must be a whole number"),
    ],
)
def test_error_names_the_command_line(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[word])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("run.name=1e3", "1e3"),
        ("run.name=007", "007"),
        ("run.name=true", "true"),
        ("run.name=a: b", "a: b"),
        ("run.name=[x", "[x"),
        ("run.name=null", None),
        ("run.name=", None),
    ],
)
def test_text_settings_stay_text(word: str, value: str | None) -> None:
    assert load_config(overrides=[word]).run.name == value


def test_missing_file_and_folder_instead_of_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^nope.yaml: no such file"):
        load_config("nope.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_dotenv_syntax(write: Write) -> None:
    text = "# comment\n\nexport A=1\nB='x # y'\nC=\"two words\"  # why\nD = plain # why\nE=\nF=a#b\nG=# nothing\nH='"
    assert read_dotenv(Path(write(text, ".env"))) == {
        "A": "1",
        "B": "x # y",
        "C": "two words",
        "D": "plain",
        "E": "",
        "F": "a#b",
        "G": "",
        "H": "'",
    }


def test_dotenv_errors(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"^.env: line 2 is not NAME=value: 'what is this'"):
        read_dotenv(Path(write("A=1\nwhat is this", ".env")))
    Path(".env").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"^.env: cannot be read"):
        read_dotenv(Path(".env"))


def test_export_dotenv_leaves_settings_and_set_variables_alone(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALREADY_SET", "mine")
    monkeypatch.setenv("FOR_A_LIBRARY", "removed again by monkeypatch")
    monkeypatch.delenv("FOR_A_LIBRARY")
    write("FOR_A_LIBRARY=key\nALREADY_SET=other\nGPU_HOST=x\nDTRAIN_TRAINING__LR=1", ".env")
    export_dotenv()
    assert os.environ["FOR_A_LIBRARY"] == "key"
    assert os.environ["ALREADY_SET"] == "mine"
    assert "GPU_HOST" not in os.environ
    assert "DTRAIN_TRAINING__LR" not in os.environ


def test_variables_of_the_mpi_backend_are_no_settings() -> None:
    assert load_config(environ={"DTRAIN_MPI_SHARED_MEMORY": "0"}).to_dict() == load_config(environ={}).to_dict()
