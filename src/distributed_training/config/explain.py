"""What each setting is, means and came from, as rows for `dtrain config explain` and the documentation."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from dataclasses import dataclass
from typing import Any

from distributed_training.config.config import Config, Origin, known_keys, section_types


@dataclass(frozen=True)
class Explanation:
    """One setting: its value, who set it last, and what that overrode."""

    key: str
    value: Any
    source: str
    overrode: list[Origin]
    meaning: str


def explain(config: Config) -> list[Explanation]:
    """A row for every setting, in the order of the schema; free mappings are opened to the keys they hold."""
    keys = [k for key in known_keys() for k in (key, *sorted(o for o in config._origins if o.startswith(key + ".")))]
    rows = []
    for key in keys:
        *overrode, winner = config.origins(key)
        rows.append(Explanation(key, config.get(key), winner.source, overrode[::-1], meanings().get(key, "")))
    return rows


_HEADER = """\
# All settings, with their defaults: keep the lines you change.
# Values are merged in this order, later ones win: defaults, this file, .env, environment, command line (key=value).
# ${training.epochs} stands for the value of another setting. `dtrain config explain` shows where each value came from.
"""


def example_yaml() -> str:
    """A config file with every setting, its default and its meaning."""
    from omegaconf import OmegaConf

    lines = [_HEADER]
    defaults = Config()
    for name, section in section_types().items():
        lines.append(f"{name}:  # {inspect.getdoc(section)}")
        opened = ""
        for key in (k for k in known_keys() if k.startswith(f"{name}.")):
            *parents, leaf = key.split(".")[1:]
            if parents and parents[0] != opened:
                opened = parents[0]
                lines.append(f"  {opened}:")
            indent = "  " * (len(parents) + 1)
            value = OmegaConf.to_yaml(OmegaConf.create({leaf: defaults.get(key)})).strip()
            lines += [f"{indent}# {meanings()[key]}", indent + value]
        lines.append("")
    return "\n".join(lines)


@functools.cache
def meanings() -> dict[str, str]:
    """The docstring under each field of the schema, by dotted key."""
    found: dict[str, str] = {}
    for name, section in section_types().items():
        _collect(section, f"{name}.", found)
    return found


def _collect(section: type, prefix: str, found: dict[str, str]) -> None:
    (node,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(node, ast.ClassDef)
    for field_name, doc in _field_docstrings(node).items():
        nested = section.__dataclass_fields__[field_name].default_factory  # type: ignore[attr-defined]
        if isinstance(nested, type) and dataclasses.is_dataclass(nested):
            _collect(nested, f"{prefix}{field_name}.", found)
        else:
            found[prefix + field_name] = doc


def _field_docstrings(node: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for statement, following in zip(node.body, node.body[1:]):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[statement.target.id] = str(following.value.value)
    return docs
