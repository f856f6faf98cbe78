"""The words of a command line as a config: an optional file first, then key=value settings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from distributed_training.config import Config
    from distributed_training.runtime.run_directory import RunDirectory

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [KEY=VALUE]...", help="A YAML file, then settings such as `training.lr=0.01`."),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, such as `runs/NAME`.")]


def split_words(words: list[str] | None) -> tuple[str | None, list[str]]:
    """(config file or None, overrides). A first word without `=` is the file."""
    from distributed_training.config import ConfigError
    from distributed_training.config.config import known_keys

    words = words or []
    if words and words[0] in known_keys():
        raise ConfigError(f"command line: {words[0]} needs a value: {words[0]}=...")
    names_file = bool(words) and ("=" not in words[0] or Path(words[0]).is_file())
    return (words[0], words[1:]) if names_file else (None, words)


def config_from(words: list[str] | None) -> Config:
    """The config that the words describe; without a file, ./config.yaml if there is one."""
    from distributed_training.config.load import default_file, export_dotenv, load_config

    export_dotenv()
    path, overrides = split_words(words)
    return load_config(path or default_file(), overrides)


def config_of_run(run: RunDirectory, overrides: list[str] | None) -> Config:
    """The config of an existing run with settings changed."""
    from distributed_training.config.load import export_dotenv, load_config

    export_dotenv()
    refuse_run_of_python(run)
    return load_config(run.config_file, overrides or [])


def words_to_resume(words: list[str] | None, resume: str | None) -> list[str]:
    """The words of a config that goes on as `--resume` says: without a config file, with the run's own settings."""
    from distributed_training.runtime.run_directory import RunDirectory, newest_run

    path, overrides = split_words(words)
    if resume is None or path is not None:
        return [*(words or []), *([f"checkpoint.resume={resume}"] if resume else [])]
    run: RunDirectory | None = None
    if resume == "auto":
        run = newest_run(config_from(overrides), any_job=not overrides)
        resume = str(run.path) if run is not None else resume  # the very run that was found, whatever its name
    else:
        folders = [RunDirectory(folder) for folder in (Path(resume), *Path(resume).resolve().parents[:2])]
        run = next((folder for folder in folders if folder.config_file.is_file()), None)
    wish = f"checkpoint.resume={resume}"
    if run is None:
        return [*overrides, wish]
    refuse_run_of_python(run)
    return [str(run.config_file), *overrides, wish]


def refuse_run_of_python(run: RunDirectory) -> None:
    """A run whose data was given in Python cannot go on from the command line."""
    from distributed_training.runtime.errors import RunDirectoryError
    from distributed_training.runtime.run_directory import FROM_PYTHON

    if run.load_config().data.dataset == FROM_PYTHON:  # says so if it is no run at all
        raise RunDirectoryError(
            f"{run.path}: its data was given to a Trainer in Python; go on with it there: "
            f"Trainer(..., run_dir={str(run.path)!r}).train(..., resume='auto')"
        )


def show_logs(verbose: bool = False) -> None:
    """Warnings (and, when verbose, what is going on) to the console that also carries the progress bars."""
    from rich.logging import RichHandler

    from distributed_training.training.progress import console

    handler = RichHandler(console=console(), show_path=False, show_time=False, markup=False)
    logger = logging.getLogger("distributed_training")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    logger.propagate = False
