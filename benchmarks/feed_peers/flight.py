"""Arrow Flight: record batches over gRPC, read without a copy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from distributed_training.bench.transport.base import Case, Take, free_port, process

NEEDS = ["pyarrow"]


def _send(port: int, case: Case) -> None:
    import pyarrow as pa
    from pyarrow import flight

    inputs, targets = case.batch()
    columns = [pa.FixedSizeListArray.from_arrays(pa.array(inputs.reshape(-1)), case.width), pa.array(targets)]
    batch = pa.record_batch(columns, names=["inputs", "targets"])

    def batches() -> Iterator[Any]:
        while True:
            yield batch

    class Server(flight.FlightServerBase):
        def do_get(self, context: Any, ticket: Any) -> Any:
            return flight.GeneratorStream(batch.schema, batches())

    Server(f"grpc://127.0.0.1:{port}").serve()


def run(case: Case, take: Take) -> None:
    """A record batch a batch; its columns are the tensors'."""
    port = free_port()
    with process(_send, port, case):
        from pyarrow import flight

        client = flight.connect(f"grpc://127.0.0.1:{port}")
        deadline = time.monotonic() + 10
        while True:
            try:
                client.wait_for_available(1)
                break
            except flight.FlightUnavailableError:
                if time.monotonic() > deadline:
                    raise
        reader = client.do_get(flight.Ticket(b""))
        while True:
            columns = reader.read_chunk().data.columns
            inputs = torch.from_numpy(columns[0].values.to_numpy()).view(case.rows, case.width)
            if not take(inputs, torch.from_numpy(columns[1].to_numpy())):
                break
        reader.cancel()


WAYS = {"Arrow Flight": run}
