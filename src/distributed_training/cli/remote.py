"""`--to LINK` of `dtrain validate` and `dtrain predict`: the data is here, the model on a GPU side elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from distributed_training.config import Config
    from distributed_training.data import Dataset

To = Annotated[
    str | None,
    typer.Option(
        metavar="LINK",
        help="Use the model of the GPU side that printed this pairing link (`dtrain serve RUN --mode ...`). RUN may "
        "then be a config file, too: only its data is needed here.",
    ),
]


def validate_remotely(run: Path, words: list[str] | None, link: str, *, as_json: bool) -> None:
    """Send held-out data to a GPU side and show how its model does."""
    from distributed_training.split.seen import sample_progress
    from distributed_training.split.settings import client_options
    from distributed_training.split.validation import run_validation

    config, dataset = _data_of(run, words)
    with sample_progress(config.run.progress) as on_progress:
        result = run_validation(dataset, link, **client_options(config, on_progress=on_progress))
    if as_json:
        matrix = result.pop("confusion_matrix")
        typer.echo(json.dumps({**result, "confusion_matrix": matrix.tolist() if matrix is not None else None}))
        return
    typer.echo(f"{result['total_samples']} samples in {result['seconds']:.1f} s")
    typer.echo(f"  {'loss':<10} {result['average_loss']:.4f}")
    if result["accuracy"] is not None:
        typer.echo(f"  {'accuracy':<10} {result['accuracy']:.4f}")
    _show_skipped(result)
    _show_transfer(result, result["bytes_sent"], result["bytes_received"])


def predict_remotely(
    run: Path, words: list[str] | None, link: str, output: Path | None, *, top_k: int, full: bool, threshold: float
) -> None:
    """Send data to a GPU side and write what its model makes of it."""
    from distributed_training.split.inference import run_inference
    from distributed_training.split.results import CsvLines
    from distributed_training.split.seen import sample_progress
    from distributed_training.split.settings import client_options

    config, dataset = _data_of(run, words)
    with sample_progress(config.run.progress) as on_progress:
        result = run_inference(
            dataset,
            link,
            top_k=top_k,
            return_full_probabilities=full,
            confidence_threshold=threshold,
            output=output,
            **client_options(config, on_progress=on_progress),
        )
    if output is None:
        rows = {"prediction": result["predictions"], "confidence": result["confidences"]}
        lines = CsvLines(sys.stdout, dataset.classes)
        lines.write(0, rows if rows["confidence"] is not None else {"output": rows["prediction"]})
    else:
        typer.echo(f"{result['total_samples']} predictions in {output}")
    if result["predictions"] is None or result["confidences"] is not None:
        typer.echo(f"  {result['passed_count']} are sure by at least {threshold:g}", err=True)
    _show_skipped(result)
    transfer = result["transfer"]
    _show_transfer(result, transfer["sent"], transfer["received"], transfer["mode"])


def _data_of(run: Path, words: list[str] | None) -> tuple[Config, Dataset]:
    """Config and held-out data (or else all) of a run or of a config file."""
    from distributed_training.cli.settings import config_from, config_of_run
    from distributed_training.runtime.run_directory import RunDirectory
    from distributed_training.training.job import load_data

    config = config_of_run(RunDirectory(run), words) if run.is_dir() else config_from([str(run), *(words or [])])
    data = load_data(config)
    return config, data.validation if data.validation is not None else data.train


def _show_skipped(result: dict[str, Any]) -> None:
    for sample, text in list(result["skipped"].items())[:10]:
        typer.echo(f"  sample {sample} was left out: {text}", err=True)


def _show_transfer(result: dict[str, Any], sent: int, received: int, mode: str = "") -> None:
    typer.echo(
        f"  sent {sent / 1e6:,.2f} MB, received {received / 1e6:,.2f} MB ({received / result['total_samples']:.1f} "
        f"bytes a sample{', mode ' + mode if mode else ''}), {result['samples_per_second']:,.0f} samples/s",
        err=True,
    )
    typer.echo(f"  bottleneck: {result['bottleneck']}", err=True)
