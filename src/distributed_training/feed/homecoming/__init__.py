"""Checkpoints come home: the files of a run travel from the GPU side to a loader, and back to a new GPU side.

    GPU side:  courier (what to send, to whom) -> guest (one connection) -> wire        fetching (what a loader brings)
    home:      wire -> outbox -> receiver (a thread of the first worker) -> home (the folder)

Both ways a file is offered with size and SHA-256, asked for from the byte on that is missing, and sent in small chunks
under credit, when nothing else is to be sent. Until all of it is there and its hash is right, nobody looks at it.
"""
