"""Both sides prove that they know the token of the run before anything else is read.

Four frames of fixed size, no metadata to interpret:

    HELLO      ->  versions spoken, role, whether there is a token, 32 random bytes
    CHALLENGE  <-  version chosen, whether there is a token, 32 random bytes
    PROOF      ->  HMAC-SHA256(token, "worker" | transcript)
    ACCEPTED   <-  HMAC-SHA256(token, "server" | transcript)          or REJECTED, with a reason

The transcript is a hash of both greetings and of the fingerprint of the TLS certificate as each side sees it. So a
proof fits one connection only (a replayed one meets other random bytes), cannot be sent back to its maker (the
labels differ), cannot be passed on by somebody in the middle of a TLS connection (the fingerprints differ), and a
version changed on the way shows. The guest proves first: a stranger gets nothing from the server but random
bytes.

Without a token (loopback only; whether that is allowed is decided elsewhere) the same frames travel with a key that
everybody knows. A side that has a token never talks to one that has none.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

from distributed_training.wire.errors import AuthenticationError, PeerError, Reason
from distributed_training.wire.frames import MIN_VERSION, VERSION, Kind
from distributed_training.wire.states import Role

NONCE_SIZE = 32
MIN_TOKEN = 16
_GREETING = struct.Struct(f"<BBBB{NONCE_SIZE}s")
_REJECTED = struct.Struct("<BBBB")
PROOF_SIZE = hashlib.sha256().digest_size
_OPEN_KEY = b"distributed_training wire: no token"

GREETING_SIZES = {
    Kind.HELLO: _GREETING.size,
    Kind.CHALLENGE: _GREETING.size,
    Kind.PROOF: PROOF_SIZE,
    Kind.ACCEPTED: PROOF_SIZE,
    Kind.REJECTED: _REJECTED.size,
}
"""Exact length of each frame's body: the header alone says whether to read on."""


class Authentication:
    """One side's part in proving the token. The connection calls these in order; each body travels as one frame."""

    def __init__(self, role: Role, token: bytes | None, binding: bytes, nonce: bytes | None) -> None:
        if token is not None and len(token) < MIN_TOKEN:
            raise ValueError(f"a token needs at least {MIN_TOKEN} bytes, not {len(token)}; None means no token at all")
        if nonce is not None and len(nonce) != NONCE_SIZE:
            raise ValueError(f"a nonce has {NONCE_SIZE} bytes, not {len(nonce)}")
        self.role = role
        self.peer_role: Role | None = Role.SERVER if role is not Role.SERVER else None
        self.version = 0
        self.versions = (MIN_VERSION, VERSION)
        self._key = _OPEN_KEY if token is None else token
        self._mode = 0 if token is None else 1
        self._binding = binding
        self._nonce = nonce or secrets.token_bytes(NONCE_SIZE)
        self._hello = b""
        self._challenge = b""

    def hello(self) -> bytes:
        """What the guest says first."""
        low, high = self.versions
        self._hello = _GREETING.pack(low, high, self.role, self._mode, self._nonce)
        return self._hello

    def read_hello(self, body: bytes) -> None:
        """The server hears who its guest is; raises where they have no version or no mode in common."""
        low, high, role, mode, _ = _GREETING.unpack(body)
        self._hello = body
        if low > high or role not in (Role.WORKER, Role.CLIENT, Role.DOCTOR) or mode > 1:
            raise PeerError(f"a greeting that makes no sense: versions {low} to {high}, role {role}, mode {mode}")
        self.peer_role = Role(role)
        self.version = min(high, self.versions[1])
        if self.version < max(low, self.versions[0]):
            raise PeerError(
                f"the peer speaks protocol versions {low} to {high}, this side {self.versions[0]} to "
                f"{self.versions[1]}; install the same release on both sides",
                Reason.VERSION,
            )
        if mode != self._mode:
            raise AuthenticationError(
                "the peer has no token, and this run needs one; give it the pairing link"
                if self._mode
                else "the peer has a token, and this run has none; it is meant for another run",
                Reason.TOKEN_NEEDED if self._mode else Reason.TOKEN_UNEXPECTED,
            )

    def challenge(self) -> bytes:
        """The server's answer to a greeting."""
        self._challenge = _GREETING.pack(self.version, self._mode, 0, 0, self._nonce)
        return self._challenge

    def read_challenge(self, body: bytes) -> None:
        """The guest hears the version chosen."""
        version, mode, zero, none, _ = _GREETING.unpack(body)
        self._challenge = body
        if not self.versions[0] <= version <= self.versions[1] or zero or none:
            raise PeerError(f"the server chose version {version}, which was not offered", Reason.VERSION)
        if mode != self._mode:
            raise AuthenticationError("the server does not ask for the token: it is not the one of this run")
        self.version = version

    def proof(self, role: Role) -> bytes:
        """What the side with this role must send to prove that it knows the token."""
        transcript = hashlib.sha256()
        for part in (self._hello, self._challenge, self._binding):
            transcript.update(struct.pack("<I", len(part)))
            transcript.update(part)
        label = b"dtrain wire 1 server" if role is Role.SERVER else b"dtrain wire 1 worker"
        return hmac.new(self._key, label + transcript.digest(), hashlib.sha256).digest()

    def check_proof(self, body: bytes) -> None:
        """Refuse a peer whose proof is wrong."""
        assert self.peer_role is not None
        if not hmac.compare_digest(body, self.proof(self.peer_role)):
            raise AuthenticationError(
                f"the {self.peer_role.name.lower()} does not know the token of this run, or somebody stands between "
                "(the TLS certificate it sees is another one); use the pairing link printed by the GPU side",
                Reason.TOKEN_WRONG,
            )

    def rejected(self, reason: Reason) -> bytes:
        """The server's no: a number, never text, for the other side has proved nothing and neither have we."""
        return _REJECTED.pack(reason, self.versions[0], self.versions[1], 0)


def read_rejected(body: bytes) -> tuple[Reason, tuple[int, int]]:
    """Why the server said no, and the versions it speaks."""
    number, low, high, _ = _REJECTED.unpack(body)
    try:
        return Reason(number), (low, high)
    except ValueError:
        raise PeerError(f"the server said no for a reason of unknown number {number}") from None
