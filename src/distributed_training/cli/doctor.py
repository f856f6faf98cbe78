"""`dtrain doctor`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from distributed_training.cli.settings import Words, config_from, show_logs

if TYPE_CHECKING:
    from distributed_training.config import Config
    from distributed_training.feed.doctor.batches import BatchShape
    from distributed_training.feed.doctor.report import Check
    from distributed_training.feed.pairing import PairingLink

_MARKS = {"ok": "ok  ", "warning": "note", "failed": "FAIL"}


def doctor(
    words: Words = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="LINK", help="Look at the way to this GPU side; left out, that of the config."),
    ] = None,
    listen: Annotated[bool, typer.Option("--listen", help="Be the GPU side of such a look; trains nothing.")] = False,
    batch_bytes: Annotated[int | None, typer.Option(min=1, help="Bytes of a batch, to estimate samples/s.")] = None,
    samples_per_batch: Annotated[int | None, typer.Option(min=1, help="Samples of such a batch.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=60.0, help="Spent on the bandwidth of each direction.")] = 2.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that any one step may take.")] = 10.0,
    host: Annotated[str, typer.Option(help="With --listen: the address to listen at.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --listen: the port; 0 for any free one.")] = 29500,
    minutes: Annotated[float, typer.Option(min=0.01, help="With --listen: end by itself after so long.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find out whether and how fast batches can go from this machine to a GPU side.

    Looks at the name, the port, TLS, the token, versions, clocks, the round trip and the bandwidth of both directions;
    with a config or the size of a batch it says how many samples a second that is. Each fault comes with what to do
    about it, and ends the command with code 1. It can be used while a training runs there.

    **Examples**

    `dtrain doctor --listen` on the GPU machine (or `dtrain serve`), which prints a link

    `dtrain doctor --to LINK` on the CPU machine

    `dtrain doctor config.yaml --to LINK` with the batches of a config
    """
    if listen == bool(to or words):
        raise typer.BadParameter("give either --to LINK (or a config that has it), or --listen on the GPU machine")
    if listen:
        _listen(host, port, minutes)
        return
    from distributed_training.feed.doctor.diagnosis import diagnose

    config = config_from(words) if words else None
    batch = _batch(config, batch_bytes, samples_per_batch)
    say: Callable[[Check], None] = (lambda check: None) if as_json else _say
    ca_file = config.feed.ca_file if config is not None else ""
    found = [
        diagnose(link, batch=batch, seconds=seconds, timeout=timeout, say=say, ca_file=ca_file)
        for link in _links(to, config)
    ]
    if as_json:
        each = [one.to_dict() for one in found]
        whole = each[0] if len(each) == 1 else {"ok": all(one.ok for one in found), "links": each}
        typer.echo(json.dumps(whole, indent=2))
    elif not all(one.ok for one in found):
        typer.echo("What comes after the fault could not be looked at. Mend it and try again.")
    raise typer.Exit(0 if all(one.ok for one in found) else 1)


def _say(check: Check) -> None:
    typer.echo(f"{_MARKS[check.status]}  {check.name:<15}  {check.text}")
    if check.fix:
        typer.echo(f"{'':<23}{'what to do: ' if check.status == 'failed' else ''}{check.fix}")


def _links(to: str | None, config: Config | None) -> Sequence[str | PairingLink]:
    """One for each rank of a job. What is wrong with a link that was given is for the doctor to say."""
    if to is not None:
        return [part for part in to.split(",") if part.strip()] or [to]
    from distributed_training.split.listening import links_to

    assert config is not None
    return links_to(None, None, None, config)


def _batch(config: Config | None, size: int | None, samples: int | None) -> BatchShape | None:
    """The batches to estimate for: of the size given, or those that a config describes."""
    from distributed_training.feed.doctor.batches import BatchShape, measure_batches

    if size is not None:
        return BatchShape(size, samples or 1)
    if samples is not None:
        raise typer.BadParameter("--samples-per-batch needs --batch-bytes")
    if config is None:
        return None
    from distributed_training.training.job import load_data, make_loader

    data = load_data(config).train
    return measure_batches(data, make_loader(data, config, training=True).plan)


def _listen(host: str, port: int, minutes: float) -> None:
    """Answer doctors until Ctrl-C or the time is over."""
    from distributed_training.feed.doctor.server import DoctorServer
    from distributed_training.runtime.signals import StopSignals

    show_logs()
    end = time.monotonic() + 60 * minutes
    with DoctorServer(host=host, port=port) as server, StopSignals() as signals:
        typer.echo(f"Listening at {server.host}:{server.port} for {minutes:g} minutes. On the CPU machine:")
        typer.echo(f"  dtrain doctor --to '{server.link()}'")
        while signals.received is None and time.monotonic() < end:
            time.sleep(0.2)
