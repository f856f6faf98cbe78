"""The conversation as one table that both sides obey: (who sends, state, what is sent) -> next state.

Both ends keep the same kind of state and look up everything that is sent, by themselves or by the peer, in the same
table. What is not in the table is illegal: for the peer it ends the connection, for this side it is refused before a
byte is sent.

Up to the handshake's end only one side may speak in each state, so both are always in the same one. After it both
speak at once, and messages cross on the way; that is harmless, because they leave the state as it is. Only leaving
needs care: whoever says GOODBYE says nothing after it, but must still hear what was on its way, so a state remembers
who has left, until the other side says GOODBYE too.

    HELLO -> CHALLENGE -> PROOF -> VERDICT -> JOIN -> ADMIT_* -> WORKING | SERVING | CHECKING -> *_LEFT -> CLOSED
"""

from __future__ import annotations

from enum import IntEnum

from distributed_training.wire.frames import Kind


class Role(IntEnum):
    """Who somebody is. The server is the GPU side; all others are its guests, whichever side opened the connection."""

    SERVER = 0
    WORKER = 1
    """A loader process: takes leases, sends batches."""
    CLIENT = 2
    """Sends batches to be validated or predicted, gets results."""
    DOCTOR = 3
    """Only measures the way to the server."""


class State(IntEnum):
    """Where the conversation is. Those up to VERDICT are before authentication."""

    HELLO = 0
    CHALLENGE = 1
    PROOF = 2
    VERDICT = 3
    JOIN = 4
    ADMIT_WORKER = 5
    ADMIT_CLIENT = 6
    ADMIT_DOCTOR = 7
    WORKING = 8
    SERVING = 9
    CHECKING = 10
    SERVER_LEFT = 11
    WORKER_LEFT = 12
    CLIENT_LEFT = 13
    DOCTOR_LEFT = 14
    CLOSED = 15


_BOTH = {Kind.PING, Kind.PONG, Kind.CREDIT, Kind.BLOCKED, Kind.PROBE, Kind.PROBE_REPORT}
_BLOBS = {Kind.BLOB_OFFER, Kind.BLOB_PULL, Kind.BLOB_CHUNK, Kind.BLOB_DONE}

SENDS: dict[Role, set[Kind]] = {
    Role.WORKER: {Kind.REQUEST, Kind.RELEASE, Kind.BATCHES, Kind.SAMPLE_FAILED} | _BLOBS | _BOTH,
    Role.CLIENT: {Kind.TASK, Kind.TASK_END, Kind.BATCHES, Kind.SAMPLE_FAILED} | _BLOBS | _BOTH,
    Role.DOCTOR: set(_BOTH),
}
"""What each role may send once it is welcome."""

SERVER_SENDS: dict[Role, set[Kind]] = {
    Role.WORKER: {Kind.LEASE, Kind.CANCEL, Kind.PROGRESS, Kind.NO_WORK} | _BLOBS | _BOTH,
    Role.CLIENT: {Kind.RESULTS, Kind.CANCEL, Kind.PROGRESS, Kind.NO_WORK} | _BLOBS | _BOTH,
    Role.DOCTOR: set(_BOTH),
}
"""What the server may send to a role that is welcome."""

ADMIT = {Role.WORKER: State.ADMIT_WORKER, Role.CLIENT: State.ADMIT_CLIENT, Role.DOCTOR: State.ADMIT_DOCTOR}
OPEN = {Role.WORKER: State.WORKING, Role.CLIENT: State.SERVING, Role.DOCTOR: State.CHECKING}
LEFT = {Role.WORKER: State.WORKER_LEFT, Role.CLIENT: State.CLIENT_LEFT, Role.DOCTOR: State.DOCTOR_LEFT}

Table = dict[tuple[Role, State, Kind], State]


def _table() -> Table:
    server = Role.SERVER
    table: Table = {}
    for role in (Role.WORKER, Role.CLIENT, Role.DOCTOR):
        admit, opened, left = ADMIT[role], OPEN[role], LEFT[role]
        table |= {
            (role, State.HELLO, Kind.HELLO): State.CHALLENGE,
            (server, State.CHALLENGE, Kind.CHALLENGE): State.PROOF,
            (server, State.CHALLENGE, Kind.REJECTED): State.CLOSED,
            (role, State.PROOF, Kind.PROOF): State.VERDICT,
            (server, State.VERDICT, Kind.ACCEPTED): State.JOIN,
            (server, State.VERDICT, Kind.REJECTED): State.CLOSED,
            (role, State.JOIN, Kind.JOIN): admit,
            (server, admit, Kind.WELCOME): opened,
            (server, admit, Kind.REFUSED): State.CLOSED,
        }
        table |= {(role, opened, kind): opened for kind in SENDS[role]}
        table |= {(server, opened, kind): opened for kind in SERVER_SENDS[role]}
        # Leaving: what was on its way when the other side left is still heard.
        for state in (State.JOIN, admit, opened):
            table[role, state, Kind.GOODBYE] = left
            table[server, state, Kind.GOODBYE] = State.SERVER_LEFT
        table |= {(role, State.SERVER_LEFT, kind): State.SERVER_LEFT for kind in SENDS[role] | {Kind.JOIN}}
        table |= {(server, left, kind): left for kind in SERVER_SENDS[role] | {Kind.WELCOME}}
        table[server, left, Kind.REFUSED] = State.CLOSED
        table[role, State.SERVER_LEFT, Kind.GOODBYE] = State.CLOSED
        table[server, left, Kind.GOODBYE] = State.CLOSED
        # An ERROR ends everything at once, whoever says it.
        for state in (State.JOIN, admit, opened, left, State.SERVER_LEFT):
            table[role, state, Kind.ERROR] = State.CLOSED
            table[server, state, Kind.ERROR] = State.CLOSED
    return table


TABLE: Table = _table()
