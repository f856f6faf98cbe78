"""What a user's own function gets: parameters by their names in the space, and by short names where one is meant."""

from __future__ import annotations

from typing import Any

from distributed_training.config.config import ALIASES


class Parameters(dict[str, Any]):
    """A dict in which `config["lr"]` and `config["learning_rate"]` find `training.lr`, if nothing else is called so."""

    def __missing__(self, name: str) -> Any:
        found = self._full_name(name)
        section = {key.removeprefix(f"{name}."): value for key, value in self.items() if key.startswith(f"{name}.")}
        if section:
            return Parameters(section)
        if found is None:
            raise KeyError(f"{name}: not among the parameters of this trial ({', '.join(self)})")
        return self[found]

    def get(self, name: str, default: Any = None) -> Any:
        """The value, or `default`: also for a parameter whose condition did not hold."""
        found = self._full_name(name) if name not in self else name
        return default if found is None else super().get(found, default)

    def _full_name(self, name: str) -> str | None:
        names = {name, *(full.rpartition(".")[2] for alias, full in ALIASES.items() if alias.endswith(f".{name}"))}
        found = [full for full in self if full.rpartition(".")[2] in names]
        return found[0] if len(found) == 1 else None
