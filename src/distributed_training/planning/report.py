"""A plan for people and programs: Markdown, one HTML page, the scaling curve as PNG, and JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from distributed_training.bench.canvas import DARK, LIGHT
from distributed_training.bench.page import Html, Image, figure, table, tiles_section, whole_page
from distributed_training.planning.plots import draw_scaling
from distributed_training.planning.predictions import Plan, Prediction
from distributed_training.planning.units import bandwidth_text, size_text, time_text
from distributed_training.runtime.errors import BenchError

FORMAT = 1
_HEAD = ("strategy", "memory", "fits", "step", "waiting", "sent", "samples/s", "efficiency")


def markdown(plan: Plan, picture: str = "") -> str:
    """The whole plan."""
    lines = [f"# Plan: {plan.title}", "", f"`{plan.command}`", "", *_paragraphs(plan), ""]
    for advice in plan.advice:
        lines += [f"## {_devices(advice.ranks)}", ""]
        lines += [f"**{advice.label}** (`{advice.settings}`): " if advice.label else "**Nothing fits**: "]
        lines[-1] += "; ".join(advice.reasons) + "."
        lines += ["", *_table(_head(plan), [_cells(one, plan.epochs) for one in plan.at(advice.ranks)]), ""]
        lines += [f"- {remedy}" for remedy in advice.remedies] + ([""] if advice.remedies else [])
    if plan.measured:
        lines += ["## Predicted and measured", "", *_table(_MEASURED, _measured_cells(plan)), "", *_errors(plan), ""]
    if picture:
        lines += ["## Scaling", "", f"![Scaling to 1,024 GPUs]({picture})", ""]
    lines += ["## Notes", "", *[f"- {note}" for note in _all_notes(plan)]]
    return "\n".join(lines) + "\n"


def to_dict(plan: Plan) -> dict[str, Any]:
    """Everything in plain values."""
    rows = []
    for one in plan.predictions:
        row = {
            "strategy": one.way.label,
            "settings": one.way.settings,
            "exact": one.way.exact,
            "installed": one.way.installed,
            "ranks": one.ranks,
            "batch_per_rank": one.batch,
            "batch": one.global_batch,
            "only_a_check": one.check,
            "memory": {**dataclasses.asdict(one.memory), "total": one.memory.total, "needed": one.needed},
            "fits": one.fits,
            "step": {**dataclasses.asdict(one.time), "total": one.time.whole},
            "samples_per_second": one.throughput,
            "efficiency": one.efficiency,
            "hours_per_epoch": one.hours_per_epoch,
            "cost_per_epoch": one.cost_per_epoch,
        }
        if one.measured_step is not None:
            row["measured"] = {"memory": one.measured_memory, "step": one.measured_step, "pace": one.pace}
            row["error"] = {"memory": one.memory_error, "step": one.step_error}
        if one.trouble:
            row["trouble"] = one.trouble
        rows.append(row)
    return {
        "format": FORMAT,
        "command": plan.command,
        "model": {key: value for key, value in plan.model.items() if key not in _LONG},
        "cluster": dataclasses.asdict(plan.cluster),
        "assumed": plan.assumed,
        "scaling": plan.scaling,
        "epochs": plan.epochs,
        "predictions": rows,
        "advice": [dataclasses.asdict(one) for one in plan.advice],
        "curves": [dataclasses.asdict(one) for one in plan.curves],
        "notes": plan.notes,
    }


_LONG = ("names", "shapes", "bytes", "state_bytes", "units")


def write_plan(plan: Plan, output: Path) -> list[Path]:
    """Write OUTPUT (.md) and beside it .html, .png and .json. Gives the files."""
    output = output if output.suffix else output / "plan.md"
    files = {kind: output.with_suffix(f".{kind}") for kind in ("md", "html", "png", "json")}
    light, dark = (draw_scaling(plan, theme) for theme in (LIGHT, DARK))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        files["png"].write_bytes(light)
        files["md"].write_text(markdown(plan, files["png"].name), encoding="utf-8")
        files["json"].write_text(json.dumps(to_dict(plan), indent=2) + "\n", encoding="utf-8")
        files["html"].write_text(_page(plan, Image("Scaling", light, dark, "to 1,024 GPUs")), encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{error.filename}: the plan cannot be written ({error.strerror})") from None
    return list(files.values())


def _page(plan: Plan, image: Image) -> str:
    last = plan.advice[-1]
    best = next((one for one in plan.at(last.ranks) if one.way.label == last.label), None)
    tiles = [("parameters", f"{plan.model['parameters']:,}", plan.model["optimizer"])]
    if best is not None:
        tiles += [
            (f"on {best.ranks}", best.way.label, f"{time_text(best.time.whole)} a step"),
            ("memory of a device", size_text(best.needed), f"of {size_text(plan.cluster.device_memory)}"),
            ("efficiency", f"{best.efficiency:.0%}", f"{best.throughput:,.0f} samples a second"),
        ]
    sections = [
        f"<header><h1>Plan: {_escaped(plan.title)}</h1></header>",
        f'<p class="muted">{_escaped(plan.command)}</p>',
        tiles_section(tiles),
        f'<section class="plots">{figure(image)}</section>',
    ]
    for advice in plan.advice:
        reasons = "".join(f"<li>{_escaped(reason)}</li>" for reason in [*advice.reasons, *advice.remedies])
        name = _escaped(advice.label or "nothing fits")
        rows = [_cells(one, plan.epochs) for one in plan.at(advice.ranks)]
        title = f"{_escaped(_devices(advice.ranks))}: {name}"
        sections.append(f"<section><h2>{title}</h2><ul>{reasons}</ul>{table(_head(plan), rows)}</section>")
    if plan.measured:
        shown = table(_MEASURED, _measured_cells(plan))
        sections.append(f"<section><h2>Predicted and measured</h2>{shown}</section>")
    notes = "".join(f"<li>{_escaped(note)}</li>" for note in _all_notes(plan))
    sections.append(f"<section><h2>Notes</h2><ul>{notes}</ul></section>")
    return whole_page(f"Plan: {plan.title}", sections)


def _escaped(text: str) -> Html:
    from html import escape

    return Html(escape(text))


def _paragraphs(plan: Plan) -> list[str]:
    model, cluster = plan.model, plan.cluster
    batch = "for each device" if plan.scaling == "weak" else "in all"
    text = (
        f"{model['parameters']:,} parameters, {model['optimizer']}, {model['precision']}, a batch of "
        f"{plan.global_batch} {batch}, {model['samples']:,} samples, {plan.epochs} epochs. Machines of "
        f"{cluster.per_node} with {size_text(cluster.device_memory)} for each rank, "
        f"{bandwidth_text(cluster.bandwidth)} between them."
    )
    return [text]


def _head(plan: Plan) -> tuple[str, ...]:
    return (
        *_HEAD,
        "epoch",
        *(("cost of an epoch", f"of {plan.epochs} epochs") if plan.cluster.price is not None else ()),
    )


def _cells(one: Prediction, epochs: int) -> tuple[str, ...]:
    cost: tuple[str, ...] = ()
    if one.cost_per_epoch is not None:
        cost = (f"{one.cost_per_epoch:,.2f}", f"{one.cost_per_epoch * epochs:,.2f}")
    name = one.way.label + ("" if one.way.installed else " (not installed)") + ("" if one.way.exact else " (rounds)")
    return (
        name,
        size_text(one.memory.total),
        "yes" if one.fits else "NO",
        time_text(one.time.whole),
        f"{one.time.waited / one.time.whole:.0%}",
        size_text(one.time.sent) if one.time.sent else "",
        f"{one.throughput:,.0f}" if one.throughput >= 10 else f"{one.throughput:.2g}",
        f"{one.efficiency:.0%}",
        _hours(one.hours_per_epoch),
        *cost,
    )


def _hours(hours: float) -> str:
    from distributed_training.bench.page import duration

    return duration(hours * 3600)


_MEASURED = ("strategy", "ranks", "batch", "memory", "measured", "error", "step", "measured", "error")


def _measured_cells(plan: Plan) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one in plan.measured:
        if one.measured_memory is None or one.measured_step is None:
            rows.append((one.way.label, str(one.ranks), str(one.global_batch), "", one.trouble[:80], "", "", "", ""))
            continue
        rows.append(
            (
                one.way.label,
                str(one.ranks),
                str(one.global_batch),
                size_text(one.memory.total),
                size_text(one.measured_memory),
                f"{one.memory_error:+.1%}",
                time_text(one.time.whole * one.pace),
                time_text(one.measured_step),
                f"{one.step_error:+.1%}",
            )
        )
    return rows


def _errors(plan: Plan) -> list[str]:
    """The middle error, without regard to sign."""
    import statistics

    memory = [abs(one.memory_error) for one in plan.measured if one.memory_error is not None]
    steps = [abs(one.step_error) for one in plan.measured if one.step_error is not None]
    if not memory or not steps:
        return []
    text = (
        f"Median error: memory {statistics.median(memory):.1%}, step {statistics.median(steps):.1%}; "
        f"largest: memory {max(memory):.1%}, step {max(steps):.1%}."
    )
    return [text]


def _all_notes(plan: Plan) -> list[str]:
    assumed = [f"assumed: {text}" for text in plan.assumed]
    links = [
        f"{one.ranks} ranks by {name} on this machine: {bandwidth_text(_rate(one.times['all_reduce']))} in an "
        f"all-reduce of 64 MiB, {one.overlap:.0%} of a transfer is free beside a computation"
        for name, one in plan.cluster.links.items()
    ]
    return [*plan.notes, *links, *assumed, "predictions: docs/planning.md has the formulas"]


def _rate(points: list[tuple[float, float]]) -> float:
    size, seconds = points[-1]
    return size / seconds


def _devices(ranks: int) -> str:
    return "1 device" if ranks == 1 else f"{ranks:,} devices"


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
