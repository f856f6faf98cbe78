"""`dtrain bench`: how fast is it here, how does it scale, and is it still as fast as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distributed_training.cli.counts import counts_and_words
from distributed_training.cli.settings import Words
from distributed_training.config.errors import ConfigError

if TYPE_CHECKING:
    from distributed_training.bench.figures import BenchReport
    from distributed_training.bench.options import BenchOptions
    from distributed_training.config import Config

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""
Measure: variants take turns in one run, and the report says what can be concluded.

`dtrain bench scaling --gpus 1 2 4 --output reports/benchmark.md` writes the report, its plots, a page and JSON

`dtrain bench all --quick` looks at everything in a few minutes

`dtrain bench compare old.json new.json` shows what became slower
""",
)
ROUNDS, QUICK_ROUNDS = 7, 3

Gpus = Annotated[
    list[str] | None,
    typer.Option(
        "--gpus",
        "--processes",
        metavar="N...",
        help="Numbers of GPUs to compare, `1 2 4` or `1,2,4`; processes on the CPU where there are none.",
    ),
]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        "--strategies",
        help="Of `scaling`, the one to measure; of `strategies`, those to compare: `ddp,zero3,deepspeed+zero_stage=3`.",
    ),
]
OutputFile = Annotated[
    Path | None,
    typer.Option(help="A Markdown file; the JSON, the page and the plots are named after it."),
]
Rounds = Annotated[int | None, typer.Option(min=1, help=f"Measured rounds; {ROUNDS}, with --quick {QUICK_ROUNDS}.")]
Warmup = Annotated[int, typer.Option(min=0, help="Rounds before them that are thrown away.")]
Quick = Annotated[bool, typer.Option("--quick", help="Short turns and few rounds: a look, not a result.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Model = Annotated[str | None, typer.Option(help="A named model, in place of the part's own choice.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Global batch size, in place of the part's own choice.")]
Cases = Annotated[str | None, typer.Option(help="Only these cases of the part, with commas between.")]
Variants = Annotated[str | None, typer.Option(help="Only these variants of the part, with commas between.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start the processes anew for every turn: less memory at a time.")]
Timeout = Annotated[float, typer.Option(min=1.0, help="Seconds that one turn may take.")]


def _measuring(names: Callable[[], list[str]], summary: str) -> Callable[..., None]:
    """A command that runs parts: they all have the same options."""

    def command(
        words: Words = None,
        gpus: Gpus = None,
        strategy: Strategy = None,
        output: OutputFile = None,
        rounds: Rounds = None,
        warmup: Warmup = 1,
        quick: Quick = False,
        device: Device = "auto",
        model: Model = None,
        batch_size: BatchSize = None,
        cases: Cases = None,
        variants: Variants = None,
        fresh: Fresh = False,
        timeout: Timeout = 600.0,
    ) -> None:
        from distributed_training.bench.options import BenchOptions

        chosen = names()
        if len(chosen) > 1 and (cases or variants):
            raise ConfigError("--cases and --variants name those of one part: give `dtrain bench PART --cases ...`")
        processes, rest = counts_and_words(gpus, words)
        options = BenchOptions(
            rounds=rounds or (QUICK_ROUNDS if quick else ROUNDS),
            warmup=warmup,
            quick=quick,
            device=device,
            processes=processes,
            strategies=_names(strategy),
            cases=_names(cases),
            variants=_names(variants),
            model=model,
            batch_size=batch_size,
            config=_config(rest),
            fresh=fresh,
            timeout=timeout,
            say=_say,
        )
        _run(chosen, options, output)

    command.__doc__ = summary
    return command


def _run(names: list[str], options: BenchOptions, output: Path | None) -> None:
    from distributed_training.bench.output import Output
    from distributed_training.bench.parts import part_named
    from distributed_training.bench.suite import FAILED, run_parts
    from distributed_training.cli.settings import show_logs

    show_logs()
    place = Output(output) if output is not None else None
    report = run_parts([part_named(name) for name in names], options, place, _command())
    _show(report)
    if place is not None and report.parts:
        typer.echo(f"report  {place.markdown}\npage    {place.html}\nJSON    {place.json}", err=True)
    if report.interrupted:
        typer.echo("interrupted: what was done by then is reported", err=True)
        raise typer.Exit(130)
    if any(part.problem.startswith(FAILED) for part in report.parts):
        raise typer.Exit(1)


def _show(report: BenchReport) -> None:
    """The tables, on the screen."""
    from distributed_training.bench.markdown import to_markdown

    if report.parts:
        typer.echo(to_markdown(report, {}), nl=False)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text is not None else ()


def _config(words: list[str] | None) -> Config | None:
    """The user's own job, where words describe one; a config.yaml that happens to be here is not meant."""
    if not words:
        return None
    from distributed_training.cli.settings import split_words
    from distributed_training.config.load import export_dotenv, load_config

    export_dotenv()
    path, overrides = split_words(words)
    return load_config(path, overrides)


def _command() -> str:
    import shlex

    return shlex.join(["dtrain", *sys.argv[1:]])


def _register() -> None:
    from distributed_training.bench.parts import PARTS

    for part in PARTS.values():
        summary = f"{part.measures[0].upper()}{part.measures[1:]}."
        app.command(part.name)(_measuring(lambda name=part.name: [name], summary))  # type: ignore[misc]
    every = "All parts, one after the other. A part that cannot run here is named with its reason."
    app.command("all")(_measuring(lambda: list(PARTS), every))


_register()


@app.command("list")
def list_parts() -> None:
    """The parts, and what each measures."""
    from distributed_training.bench.parts import PARTS

    width = max(map(len, PARTS))
    for part in PARTS.values():
        typer.echo(f"{part.name:<{width}}  {part.measures}")


@app.command()
def merge(
    reports: Annotated[list[Path], typer.Argument(metavar="A.json B.json...", help="Reports of one machine.")],
    output: Annotated[Path, typer.Option(help="The Markdown file of the whole, as for the others.")],
) -> None:
    """One report, with its plots and page, of several that were measured one by one."""
    from distributed_training.bench.merging import merge_reports
    from distributed_training.bench.output import Output
    from distributed_training.bench.records import read_report

    merged = merge_reports([(str(path), read_report(path)) for path in reports])
    place = Output(output)
    place.check()
    place.write(merged)
    typer.echo(f"report  {place.markdown}\npage    {place.html}\nJSON    {place.json}", err=True)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="The report of before.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="The report of after.")],
    threshold: Annotated[
        float, typer.Option(min=0.0, help="Relative change below which nothing is said, however quiet the machine.")
    ] = 0.05,
    fail: Annotated[bool, typer.Option("--fail", help="End with code 1 if anything became worse.")] = False,
    output: Annotated[Path | None, typer.Option(help="Write the table to this Markdown file too.")] = None,
) -> None:
    """What became better or worse between two reports, beyond the noise of both."""
    from distributed_training.bench.comparing import compare_reports
    from distributed_training.bench.records import read_report, write_file

    changes = compare_reports(read_report(before), read_report(after), threshold)
    table = changes.markdown()
    if output is not None:
        write_file(output, table)
    typer.echo(table, nl=False)
    raise typer.Exit(1 if fail and changes.regressions else 0)
