"""The figures of a part as rows of text: the same in Markdown, on the page and on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distributed_training.bench.figures import Figure, PartResult
from distributed_training.bench.page import number


@dataclass(frozen=True)
class Table:
    """One table: what all rows have in common, the names of the columns, and the cells."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(part: PartResult) -> list[Table]:
    """One table for each case and quantity. Ratios first: they are what carries over to other machines."""
    return [_table(part, case, quantity, group) for (case, quantity), group in part.groups().items()]


def _table(part: PartResult, case: str, quantity: str, group: Sequence[Figure]) -> Table:
    way = {"higher": ", higher is better", "lower": ", lower is better", "neither": ""}[group[0].better]
    title = f"{case}: {quantity}{way}" if case else f"{quantity}{way}"
    unit = f"median, {group[0].unit}" if group[0].unit else "median"
    references = {figure.reference for figure in group if figure.reference is not None}
    conclusions = [_conclusion(part, figure) for figure in group]
    ratios = bool(references)
    head = ["variant", *([f"to {next(iter(references))}" if len(references) == 1 else "to its reference"] * ratios)]
    head += [unit, "spread", *(["what can be said"] * any(conclusions))]
    rows = []
    for figure, conclusion in zip(group, conclusions):
        cells = [figure.variant, *([_ratio(part, figure)] * ratios), number(figure.median)]
        cells += [f"{figure.spread:.3f}" if len(figure.values) > 1 else "", *([conclusion] * any(conclusions))]
        rows.append(tuple(cells))
    return Table(title, tuple(head), rows)


def _ratio(part: PartResult, figure: Figure) -> str:
    found = part.comparison(figure)
    if found is None:
        return "1" if figure.reference == figure.variant else ""
    return f"{found.median:.3f}" if found.median < 10 else f"{found.median:.1f}"


def _conclusion(part: PartResult, figure: Figure) -> str:
    found = part.comparison(figure)
    if found is not None and len(set(figure.values)) > 1:  # what is the same in every round has no noise
        return found.words
    return ""


def too_noisy(part: PartResult) -> str:
    """A sentence where there are comparisons that nothing can be concluded from; empty where there are none."""
    compared = [(f, part.comparison(f)) for f in part.figures if len(set(f.values)) > 1]
    found = [(figure, comparison) for figure, comparison in compared if comparison is not None]
    noisy = [(figure, comparison) for figure, comparison in found if comparison.too_noisy]
    if not noisy:
        return ""
    worst = max(comparison.spread for _, comparison in noisy)
    names = ", ".join(dict.fromkeys(figure.variant for figure, _ in noisy))
    return (
        f"{len(noisy)} of {len(found)} comparisons are too noisy to conclude (spread up to {worst:.2f}): {names}; "
        "close other programs or raise --rounds"
    )


def markdown_table(table: Table) -> str:
    """A table in Markdown, its columns aligned so that it can be read as it is."""
    lines = [tuple(_cell(cell) for cell in line) for line in (table.head, *table.rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.head))]
    text = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
