"""`dtrain native`."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", help="The MPI backend in C++: build it, and see what it is."
)


@app.command()
def build(
    force: Annotated[bool, typer.Option("--force", help="Build again, even if it is there.")] = False,
) -> None:
    """Build the MPI backend against the torch and MPI that are here, and keep it.

    Takes a few minutes, once for each version of torch and MPI; `strategy=mpi` builds it at first use otherwise.

    **Examples**

    `dtrain native build`

    `MPICXX=/usr/bin/mpicxx dtrain native build`
    """
    from distributed_training.cli.settings import show_logs
    from distributed_training.native import build as builder

    show_logs()
    library = builder.build(force=force)
    builder.load_extension()
    logging.getLogger("distributed_training").info("the MPI backend is ready: %s", library)


@app.command()
def info() -> None:
    """Show what the MPI backend is, or would be, built with, and whether it is there."""
    from distributed_training.native.build import cache_folder, find_built, load_extension
    from distributed_training.native.toolchain import cpp_standard, find_mpicxx, find_mpirun, identify, python_tag
    from distributed_training.runtime.errors import MissingDependencyError

    rows = {"torch": python_tag().removeprefix("torch-"), "standard": cpp_standard()}
    mpicxx = find_mpicxx()
    rows |= {"mpicxx": str(mpicxx or "not found"), "mpirun": str(find_mpirun() or "not found")}
    if mpicxx is not None:
        try:
            tools = identify(mpicxx)
            rows |= {"mpi": tools.mpi, "compiler": tools.compiler}
        except MissingDependencyError as error:
            rows["compiler"] = str(error)
    built = find_built()
    rows |= {"cache": str(cache_folder()), "built": str(built or "no: dtrain native build")}
    if built is not None:
        extension = load_extension()
        rows |= {"library": extension.library(), "CUDA-aware": "yes" if extension.cuda_aware() else "no"}
    for name, value in rows.items():
        typer.echo(f"{name:<22}{value}")
