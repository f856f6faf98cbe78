"""`dtrain report`."""

from __future__ import annotations

import typer

from distributed_training.cli.settings import RunPath


def report(run: RunPath) -> None:
    """Draw a run's curves, or all trials of a search: PNG files and one HTML page in its folder.

    **Example**

    `dtrain report runs/NAME`
    """
    from distributed_training.bench.report import write_report
    from distributed_training.runtime.run_directory import RunDirectory
    from distributed_training.tuning.records import SearchFolder

    if SearchFolder(run).search_file.is_file():
        from distributed_training.tuning.report import write_report as write_search_report

        typer.echo(write_search_report(run))
    else:
        typer.echo(write_report(RunDirectory(run)))
