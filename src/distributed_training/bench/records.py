"""Reports as JSON files: written atomically, and read with suspicion, as they may come from anybody."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed_training.bench.figures import FORMAT, BenchReport, Figure, PartResult, Plot
from distributed_training.runtime.errors import BenchError

_LARGEST = 64 * 2**20  # bytes: a report is a few hundred kilobytes


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, whole."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise BenchError(f"{path}: cannot be written ({error.strerror})") from None


def to_json(report: BenchReport) -> str:
    """A report as text; what is not finite is null."""
    return json.dumps(_finite(report.to_dict()), indent=1, allow_nan=False) + "\n"


def read_report(path: Path) -> BenchReport:
    """The report in a JSON file that `dtrain bench` wrote."""
    try:
        if path.stat().st_size > _LARGEST:
            raise BenchError(f"{path}: larger than {_LARGEST // 2**20} MiB, so no report of dtrain bench")
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # bad JSON, or no UTF-8
        raise BenchError(
            f"{path}: no JSON ({error}); give the .json file that dtrain bench writes beside the report"
        ) from None
    if not isinstance(body, dict) or body.get("kind") != "dtrain bench":
        raise BenchError(f"{path}: no report of dtrain bench; give the .json file that it writes beside the report")
    if body.get("format") != FORMAT:
        raise BenchError(
            f"{path}: written in format {body.get('format')!r}, and this version reads {FORMAT}; "
            "measure again, or compare with the version that wrote it"
        )
    try:
        return _report(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BenchError(f"{path}: damaged, at {type(error).__name__}: {error}; measure again") from None


def _report(body: Mapping[str, Any]) -> BenchReport:
    return BenchReport(
        machine={str(key): value for key, value in body["machine"].items()},
        versions={str(key): str(value) for key, value in body["versions"].items()},
        created=str(body["created"]),
        command=str(body.get("command", "")),
        interrupted=bool(body.get("interrupted", False)),
        parts=[_part(part) for part in body["parts"]],
    )


def _part(body: Mapping[str, Any]) -> PartResult:
    return PartResult(
        name=str(body["name"]),
        title=str(body["title"]),
        about=str(body["about"]),
        figures=[_figure(figure) for figure in body["figures"]],
        notes=[str(note) for note in body.get("notes", [])],
        skipped={str(name): str(reason) for name, reason in body.get("skipped", {}).items()},
        plots=[_plot(plot) for plot in body.get("plots", [])],
        command=str(body.get("command", "")),
        seconds=float(body.get("seconds", 0.0)),
        problem=str(body.get("problem", "")),
    )


def _plot(body: Mapping[str, Any]) -> Plot:
    allowed = {"kind": ("bars", "lines"), "show": ("values", "ratios"), "ideal": ("none", "linear", "flat")}
    for name, values in allowed.items():
        if body.get(name, values[0]) not in values:
            raise ValueError(f"a plot's {name} is {body[name]!r}")
    return Plot(**{name: str(body[name]) for name in ("title", "quantity", "xlabel", *allowed) if name in body})  # type: ignore[arg-type]


def _figure(body: Mapping[str, Any]) -> Figure:
    values = [float(value) for value in body["values"] if value is not None]
    better = body["better"]
    if not values or better not in ("higher", "lower", "neither"):
        raise ValueError(f"figure {body['variant']!r} has no values, or no direction")
    x = body.get("x")
    return Figure(
        part=str(body["part"]),
        case=str(body["case"]),
        quantity=str(body["quantity"]),
        variant=str(body["variant"]),
        unit=str(body["unit"]),
        better=better,
        values=values,
        reference=None if body.get("reference") is None else str(body["reference"]),
        x=None if x is None else float(x),
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
