"""Optional libraries and users' own code, imported when they are needed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from distributed_training.runtime.errors import ConfigError, MissingDependencyError


def require(module: str, extra: str, purpose: str, note: str = "") -> ModuleType:
    """Import an optional library, or say which extra of ours installs it, and the `note` on how."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # the library is there but broken: its own error says more
        raise MissingDependencyError(
            f"{purpose} needs {module.split('.')[0]}, which is not installed: "
            f"pip install 'distributed-training[{extra}]'{f' ({note})' if note else ''}"
        ) from None


def import_object(path: str, key: str) -> Any:
    """The object at `my_module:name`, looked up from the working directory too; `key` is the setting that named it."""
    module_name, colon, attribute = path.partition(":")
    if not colon or not attribute or not all(module_name.split(".")):
        raise ConfigError(f"{key}={path!r} must be an import path such as my_module:MyClass")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module is there, but something that it imports is not
            raise ConfigError(f"{key}={path!r}: no module named {module_name} here or in {here}") from None
        try:
            for part in attribute.split("."):
                found = getattr(found, part)
        except AttributeError:
            raise ConfigError(f"{key}={path!r}: {module_name} has no {attribute}") from None
    finally:
        if added:
            sys.path.remove(here)
    return found
