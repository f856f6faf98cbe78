"""`dtrain config`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from distributed_training.cli.settings import Words, config_from

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help="See, explain and start configurations.")


@app.command()
def explain(
    words: Words = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only settings that differ from the defaults.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show each setting with its value, where it came from, and what it overrode.

    Layers, weakest first: defaults, file, .env, environment, command line.

    **Examples**

    `dtrain config explain`

    `dtrain config explain config.yaml training.lr=0.01 --changed`
    """
    from distributed_training.config.explain import explain as explain_config

    rows = explain_config(config_from(words))
    if changed:
        rows = [row for row in rows if row.overrode and row.value != row.overrode[-1].value]
    if as_json:
        entries = [{**vars(row), "overrode": [vars(origin) for origin in row.overrode]} for row in rows]
        typer.echo(json.dumps(entries, indent=2))
        return
    width = max((len(row.key) for row in rows), default=0)
    for row in rows:
        line = f"{row.key:<{width}}  {_show(row.value):<16}  {row.source}"
        if row.overrode:
            line += "  overrode " + ", ".join(f"{_show(origin.value)} ({origin.source})" for origin in row.overrode)
        typer.echo(line)


@app.command()
def show(words: Words = None) -> None:
    """Print all settings in force as YAML."""
    from omegaconf import OmegaConf

    typer.echo(OmegaConf.to_yaml(OmegaConf.create(config_from(words).to_dict())), nl=False)


@app.command()
def init(path: Annotated[Path, typer.Argument(help="File to write.")] = Path("config.yaml")) -> None:
    """Write a commented config file that holds every setting with its default."""
    from distributed_training.config import ConfigError
    from distributed_training.config.explain import example_yaml

    if path.exists():
        raise ConfigError(f"{path}: exists already; give another name")
    path.write_text(example_yaml())
    typer.echo(f"{path} written; train with: dtrain train {path}")


def _show(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value
