"""`best.yaml`: the settings of the best trial as a config of its own, for `dtrain train`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed_training.config import Config
from distributed_training.runtime.errors import RunDirectoryError
from distributed_training.tuning.records import SearchFolder

SECTION = "tuning"
"""The section of a config that describes a search; the config of one training has none."""


def best_config(base: Config | Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one training: those that all trials share with the parameters of one of them.

    Of a `Config` the section of the search is left out, and the name of the run, which belongs to the search: a
    training gets a name of its own. The settings of a function of the user's own stay as they are.
    """
    if not isinstance(base, Config):
        return {**base, **parameters}
    settings = base.replace(**parameters).to_dict()
    settings.pop(SECTION, None)
    settings["run"]["name"] = None
    return settings


def write_best(
    folder: str | Path, base_config: Config | Mapping[str, Any], parameters: Mapping[str, Any], note: str = ""
) -> Path:
    """Write FOLDER/best.yaml and give its path. `note` becomes the comment at its head, line by line."""
    from omegaconf import OmegaConf

    from distributed_training.config.load import literal

    file = SearchFolder(Path(folder)).best_file
    settings = OmegaConf.to_yaml(OmegaConf.create(literal(best_config(base_config, parameters))))
    head = "".join(f"# {line}\n" for line in note.splitlines())
    part = file.with_name(file.name + ".part")
    try:
        part.write_text(head + settings, encoding="utf-8")
        os.replace(part, file)  # whoever reads the best so far during a search never sees half of it
    except OSError as error:
        raise RunDirectoryError(f"{file}: cannot be written ({error.strerror})") from None
    return file
