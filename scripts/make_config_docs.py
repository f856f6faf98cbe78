"""Write the tables of docs/configuration.md from the docstrings of the schema. Run after any change to a setting."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from pathlib import Path
from typing import Any, Literal

from distributed_training.config import Config
from distributed_training.config.config import fields_of, section_types
from distributed_training.config.explain import meanings

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
BEGIN, END = "<!-- settings: written by scripts/make_config_docs.py -->", "<!-- end of settings -->"
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any value"}


def main() -> None:
    """Bring the page up to date."""
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def updated(page: str) -> str:
    """The page with everything between the markers replaced by fresh tables."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE}: the markers {BEGIN} and {END} are missing")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def tables() -> str:
    """A heading, the section's docstring and a table for every section."""
    parts = []
    for name, section in section_types().items():
        parts += [f"### `{name}`", "", inspect.getdoc(section) or "", ""]
        parts += ["| key | value | default | meaning |", "|---|---|---|---|"]
        parts += [_row(f"{name}.{key}", field, section) for key, field in fields_of(section)]
        parts.append("")
    return "\n".join(parts)


def _row(key: str, field: dataclasses.Field[Any], section: type) -> str:
    owner = section
    for part in key.split(".")[1:-1]:  # a section inside a section, such as data.augment
        owner = typing.get_type_hints(owner)[part]
    value = _value(typing.get_type_hints(owner)[field.name])
    default = Config().get(key)
    shown = default if isinstance(default, str) else json.dumps(default)
    cells = (f"`{key}`", value, f"`{shown}`", meanings()[key])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _value(annotation: Any) -> str:
    """What may be written there, in words."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in args)
    if origin is list:
        return f"list of {_value(args[0])}"
    if origin is dict:
        return "mapping"
    if args:  # X | None
        return " or ".join("`null`" if inner is type(None) else _value(inner) for inner in args)
    return WORDS[annotation]


if __name__ == "__main__":
    main()
