"""`dtrain report`."""

from __future__ import annotations

import typer

from distributed_training.cli.settings import RunPath


def report(run: RunPath) -> None:
    """Draw a run's curves: PNG files and one HTML page in the run's folder.

    **Example**

    `dtrain report runs/NAME`
    """
    from distributed_training.bench.report import write_report
    from distributed_training.runtime.run_directory import RunDirectory

    typer.echo(write_report(RunDirectory(run)))
