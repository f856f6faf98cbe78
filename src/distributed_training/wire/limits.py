"""How much a peer may ask for. Every length is compared with these before memory is taken for it.

They are part of the protocol: both sides know them, so no side can be surprised by the other's. Only the largest
payload is for each side to choose, and is told to the other in the handshake; how much may be on its way at once is
a matter of credit.
"""

from __future__ import annotations

DEFAULT_MAX_PAYLOAD = 1 << 30
"""Bytes of one frame's payload."""
MAX_METADATA = 256 << 10
"""Bytes of the metadata of a frame that carries batches."""
MAX_CONTROL = 64 << 10
"""Bytes of the metadata of any other frame."""
MAX_ITEMS = 2048
"""Elements of one msgpack array. msgpack takes memory for an array when it reads its length, at up to 1024 levels of
nesting, so this number bounds what a few bytes can make it take: 1024 x 2048 x 8 bytes = 16 MiB, for a moment."""
MAX_BATCHES = 1024
"""Batches in one frame."""
MAX_BUFFERS = 16384
"""Buffers in one frame: what keeps track of a small one takes more memory than it does itself."""
MAX_LEAVES = 1024
"""Tensors and values in one batch, and as many collections around them."""
MAX_DEPTH = 32
"""Nesting of one batch."""
MAX_LAYOUTS = 64
"""Layouts remembered for each direction of a connection."""
MAX_DIMENSIONS = 32
MAX_FIELDS = 255
"""Fields of a named tuple or dataclass."""
SHORT = 64
"""Longer strings and bytes of a batch travel in the payload instead of the metadata."""
MAX_TEXT = 4096
"""Characters of a string in a control message."""
MAX_FACTS = 64
"""Entries of the facts in a handshake or task."""
