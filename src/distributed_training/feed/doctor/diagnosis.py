"""The doctor: looks at every step of the way from a CPU machine to the GPU side, and says what to do where one fails.

It dials in as loaders do, proves the token as they do, and measures what they would have: so what works for it works
for them. Beside a training it takes little: it gets no lease, and only some seconds of the link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from distributed_training._version import __version__
from distributed_training.data.plan import PLAN_VERSION
from distributed_training.feed.dialling import proxy_of
from distributed_training.feed.doctor.batches import BatchShape
from distributed_training.feed.doctor.measures import Measures, RoundTrip
from distributed_training.feed.doctor.probing import rate_of
from distributed_training.feed.doctor.report import Check, Diagnosis, FaultError, Status, Value
from distributed_training.feed.doctor.way import Visit, describe_host, enter, find, reach, secure, upgrade
from distributed_training.feed.pairing import PairingLink
from distributed_training.runtime.errors import ConfigError

_CLOCK = 5.0  # seconds of difference from which on logs of two machines are hard to read side by side
_BUSY = 0.5  # seconds of probing each way where a training runs


def diagnose(
    link: str | PairingLink,
    *,
    batch: BatchShape | None = None,
    seconds: float = 2.0,
    timeout: float = 10.0,
    say: Callable[[Check], None] = lambda check: None,
    ca_file: str = "",
) -> Diagnosis:
    """Look at the way to a GPU side. `seconds` are spent on each direction's bandwidth, at most `timeout` on any step.

    Never raises for a fault of the way: that is a check which failed. `say` gets each check when it is made. `ca_file`
    has the authorities for a tunnel's certificate, in place of the system's.
    """
    diagnosis = Diagnosis("")

    def note(name: str, text: str, status: Status = "ok", fix: str = "", **values: Value) -> None:
        diagnosis.checks.append(Check(name, status, text, fix, values))
        say(diagnosis.checks[-1])

    try:
        _visit(diagnosis, link, _Patience(seconds, timeout, ca_file), batch, note)
    except FaultError as fault:
        diagnosis.checks.append(fault.check)
        say(fault.check)
    return diagnosis


@dataclass(frozen=True)
class _Patience:
    seconds: float
    timeout: float
    ca_file: str


def _visit(
    diagnosis: Diagnosis,
    text: str | PairingLink,
    patience: _Patience,
    batch: BatchShape | None,
    note: Callable[..., None],
) -> None:
    try:
        link = PairingLink.parse(text) if isinstance(text, str) else text
    except ConfigError as error:
        raise FaultError("link", str(error), "copy the whole link that the GPU side prints, in quotes") from None
    diagnosis.address = link.address
    parts = {"a token": link.token, "a certificate's fingerprint": link.fingerprint}
    has = " and ".join(name for name, part in parts.items() if part is not None) or "neither token nor fingerprint"
    note("link", f"leads to {link.address}, with {has}")
    addresses: list[str] = []
    if proxy_of(link) is not None:
        note("name", f"{link.host} is looked up by the proxy of the environment (HTTPS_PROXY)")
    else:
        addresses = find(link.host, patience.timeout)
        note("name", describe_host(link.host, addresses), addresses=addresses)
    start = time.monotonic()
    channel = reach(addresses, link, patience.timeout, patience.ca_file)
    try:
        note("machine", f"{channel.peer} answers after {_milliseconds(time.monotonic() - start)}")
        note("port", f"{link.port} is open")
        deadline = time.monotonic() + patience.timeout
        binding = secure(channel, link, deadline)
        note("tls", _tls(link))
        if link.carrier == "ws":
            upgrade(channel, link, deadline)
            note("tunnel", f"takes WebSockets at {link.path}, and a GPU side answers behind it")
        visit = enter(channel, link, binding, deadline)
        _versions(visit, note)
        note("token", "both sides know it" if link.token is not None else "none on this machine")
        _measure(visit, patience, batch, note)
    finally:
        channel.close()


def _tls(link: PairingLink) -> str:
    if link.by_authorities:
        return f"the certificate of {link.host}, for which the authorities known here vouch"
    if link.fingerprint is not None:
        return "TLS 1.3, the certificate of the link"
    return "TLS 1.3; the token will prove whose certificate it is" if link.encrypted else "none on this machine"


def _versions(visit: Visit, note: Callable[..., None]) -> None:
    there, plan = visit.welcome.software, visit.welcome.facts.get("plan")
    values = {"protocol": visit.protocol, "here": __version__, "there": there}
    text = f"protocol {visit.protocol}; distributed-training {__version__} here, {there} there"
    if plan != PLAN_VERSION:
        raise FaultError(
            "versions",
            f"{text}; the sample plan is of version {PLAN_VERSION} here and {plan} there",
            "install the same release on both sides: loaders would be refused",
        )
    if there != __version__:
        note("versions", text, "warning", "they understand each other; the same release on both is safer", **values)
    else:
        note("versions", text, **values)


def _measure(visit: Visit, patience: _Patience, batch: BatchShape | None, note: Callable[..., None]) -> None:
    facts = visit.welcome.facts
    loaders, most = facts.get("loaders"), facts.get("probe_bytes")
    if type(loaders) is not int or type(most) is not int or most < 1:
        raise FaultError("welcome", f"it says loaders={loaders!r}, probe_bytes={most!r}", "install the same release")
    seconds = min(patience.seconds, _BUSY) if loaders else patience.seconds
    purpose = str(facts.get("purpose"))
    note("server", f"is there for {purpose}; {loaders} loader workers are connected", purpose=purpose, loaders=loaders)
    measures = Measures(visit, patience.timeout)
    trip = measures.round_trip()
    _clock(trip, note)
    note(
        "round trip",
        f"{_milliseconds(trip.shortest)} at best, {_milliseconds(trip.median)} in the median",
        shortest_ms=round(1e3 * trip.shortest, 4),
        median_ms=round(1e3 * trip.median, 4),
    )
    beside = " beside the training" if loaders else ""
    slices = measures.there(seconds)
    there = rate_of(slices)
    values = {"slices_there": len(slices), "bytes_per_second_there": round(there)}
    note("bandwidth there", f"{_megabytes(there)}{beside}, one connection", **values)
    slices = measures.back(seconds, most)
    values = {"slices_back": len(slices), "bytes_per_second_back": round(rate_of(slices))}
    note("bandwidth back", f"{_megabytes(rate_of(slices))}{beside}, one connection", **values)
    measures.leave()
    if batch is not None:
        text, estimated = batch.estimate(there)
        note("batches", text, **estimated)


def _clock(trip: RoundTrip, note: Callable[..., None]) -> None:
    ahead = f"the clock there is {abs(trip.clock):.3f} s {'ahead' if trip.clock >= 0 else 'behind'}"
    text = f"{ahead} (+- {_milliseconds(trip.uncertain)})"
    late = abs(trip.clock) > _CLOCK
    fix = (
        "set both by NTP (`timedatectl set-ntp true`): the feed does not need it, but times in logs cannot be compared"
    )
    note("clock", text, "warning" if late else "ok", fix if late else "", clock_ahead_s=round(trip.clock, 6))


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _megabytes(rate: float) -> str:
    return f"{rate / 1e6:.4g} MB/s ({rate * 8 / 1e6:.4g} Mbit/s)"
