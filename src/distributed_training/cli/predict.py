"""`dtrain predict`."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distributed_training.cli.remote import To, predict_remotely
from distributed_training.cli.settings import Overrides, RunPath, show_logs
from distributed_training.cli.validate import Which

if TYPE_CHECKING:
    from distributed_training.data import Dataset


def predict(
    run: RunPath,
    words: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(help="A .csv or .npy file, with `--to` also .parquet; left out, CSV on standard output."),
    ] = None,
    checkpoint: Which = "best",
    to: To = None,
    top_k: Annotated[int, typer.Option(help="With `--to`: how many of the most likely classes come back.", min=1)] = 1,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="With `--to`: all probabilities come back, for .npy and .parquet.")
    ] = False,
    threshold: Annotated[
        float, typer.Option(help="With `--to`: the confidence from which on a sample passes.", min=0, max=1)
    ] = 0.8,
) -> None:
    """Predict with a trained model: a row for each held-out sample, or for other data.

    A classifier gives sample, prediction and confidence; other models give their outputs.

    **Examples**

    `dtrain predict runs/NAME --output predictions.csv`

    `dtrain predict runs/NAME data.root=new.csv data.validation_fraction=0 --output predictions.csv`

    `dtrain predict config.yaml --to LINK --output predictions.parquet --top-k 3`  (the model is on a GPU side)
    """
    show_logs()
    if to is not None:
        predict_remotely(run, words, to, output, top_k=top_k, full=probabilities, threshold=threshold)
        return
    from distributed_training.cli.trained import load_trained

    with load_trained(run, words, checkpoint) as (job, data, _):
        outputs = job.trainer.predict(data)
        classes, dataset = job.trainer.num_classes, data.dataset
    if output is not None and output.suffix == ".npy":
        _write_npy(output, outputs)
    else:
        _write_csv(output, _rows(outputs, classes, dataset))
    if output is not None:
        typer.echo(f"{data.plan.samples} predictions in {output}")


def _rows(outputs: Any, classes: int | None, dataset: Dataset) -> list[list[Any]]:
    import torch

    from distributed_training.runtime.errors import ModelError

    if not isinstance(outputs, torch.Tensor):
        raise ModelError("the model's outputs are not one tensor a sample; use trainer.predict from Python")
    if outputs.ndim == 2 and outputs.shape[1] == classes and classes > 1:
        confidence, best = outputs.softmax(1).max(1)
        names = dataset.classes or [str(n) for n in range(outputs.shape[1])]
        rows = zip(range(len(best)), [names[b] for b in best.tolist()], [f"{c:.6f}" for c in confidence.tolist()])
        return [["sample", "prediction", "confidence"], *map(list, rows)]
    flat = outputs.reshape(len(outputs), -1)
    header = ["sample", *(f"output_{n}" for n in range(flat.shape[1]))]
    return [header, *([n, *row] for n, row in enumerate(flat.tolist()))]


def _write_csv(path: Path | None, rows: list[list[Any]]) -> None:
    if path is None:
        csv.writer(sys.stdout).writerows(rows)
        return
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def _write_npy(path: Path, outputs: Any) -> None:
    import numpy as np

    np.save(path, outputs.numpy())
