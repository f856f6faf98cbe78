"""The batch protocol as a pure state machine: no sockets, no threads, no clock. `docs/protocol.md` specifies it."""

from distributed_training.wire.admission import Expected, refusal
from distributed_training.wire.batches import Batch, PackedBatch, Result, pack_batch
from distributed_training.wire.connection import Connection
from distributed_training.wire.errors import AuthenticationError, MisuseError, PeerError, ProtocolError, Reason
from distributed_training.wire.events import Authenticated, Chunk, Event, Lost, Probe, Rejected
from distributed_training.wire.frames import Kind
from distributed_training.wire.states import Role, State
from distributed_training.wire.tensors import RawTensor

__all__ = [
    "Authenticated",
    "AuthenticationError",
    "Batch",
    "Chunk",
    "Connection",
    "Event",
    "Expected",
    "Kind",
    "Lost",
    "MisuseError",
    "PackedBatch",
    "PeerError",
    "Probe",
    "ProtocolError",
    "RawTensor",
    "Reason",
    "Rejected",
    "Result",
    "Role",
    "State",
    "pack_batch",
    "refusal",
]
