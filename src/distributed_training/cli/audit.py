"""`dtrain audit`."""

from __future__ import annotations

import typer

from distributed_training.cli.settings import RunPath

_SHOWN = 20  # steps that are listed one by one


def audit(run: RunPath) -> None:
    """Prove from a run's ledger that every sample was used exactly once in every epoch.

    Steps that were done again after an interruption count once. Ends with code 1 if a step is wrong, missing or there
    twice, and names it.

    **Example**

    `dtrain audit runs/NAME`
    """
    from distributed_training.runtime.run_directory import RunDirectory
    from distributed_training.verify.audit import audit as audit_run

    found = audit_run(RunDirectory(run))
    plan, samples = found.plan, found.plan.samples
    if found.problem:
        typer.echo(f"{run}: NOT as planned: {found.problem} (epochs and steps count from 0)")
        raise typer.Exit(1)
    left_out = samples % plan.batch_size if plan.drop_last else 0
    typer.echo(f"{run}: as planned, {found.resumes} {'resume' if found.resumes == 1 else 'resumes'}")
    but = " but for those left out as they could not be loaded" if found.skipped else ""
    typer.echo(f"  {found.epochs} complete epochs: each of {samples - left_out} samples exactly once in each{but}")
    for (epoch, step), ids in list(found.skipped.items())[:_SHOWN]:
        typer.echo(f"  left out of epoch {epoch}, step {step}: {', '.join(f'sample {sample}' for sample in ids)}")
    if len(found.skipped) > _SHOWN:
        typer.echo(f"  and of {len(found.skipped) - _SHOWN} more steps: see `skipped` in ledger.jsonl")
    if left_out:
        typer.echo(f"  {left_out} samples are left out of each epoch, other ones each time (data.drop_last)")
    if found.steps:
        typer.echo(
            f"  epoch {found.epochs} is not complete: {found.steps} of {plan.steps_per_epoch} steps, no sample twice"
        )
