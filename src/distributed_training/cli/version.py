"""`dtrain version`."""

from __future__ import annotations

import typer


def version() -> None:
    """Print the versions that matter for a bug report."""
    from distributed_training.runtime.device import choose_device, machine_facts

    for name, value in machine_facts(choose_device()).items():
        typer.echo(f"{name:<22}{value}")
