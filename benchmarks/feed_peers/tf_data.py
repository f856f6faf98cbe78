"""The tf.data service: a dispatcher and a worker in one process, the reading dataset in another."""

from __future__ import annotations

import os
import time

import torch

from distributed_training.bench.transport.base import Case, Take, free_port, process

NEEDS = ["tensorflow"]


def _quiet() -> None:
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="", TF_ENABLE_ONEDNN_OPTS="0")


def _send(port: int) -> None:
    _quiet()
    from tensorflow.data.experimental import service

    dispatcher = service.DispatchServer(service.DispatcherConfig(port=port))
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=dispatcher.target.split("://")[1]))
    time.sleep(3600)
    del worker


def run(case: Case, take: Take) -> None:
    """The worker repeats a prepared batch, which is the least it can do; it is no part of it to gather."""
    port = free_port()
    with process(_send, port):
        _quiet()
        import tensorflow as tf
        from tensorflow.data.experimental import service

        dataset = tf.data.Dataset.from_tensors(case.batch()).repeat()
        mode = service.ShardingPolicy.OFF
        dataset = dataset.apply(
            service.distribute(mode, service=f"grpc://127.0.0.1:{port}", max_outstanding_requests=8)
        )
        for inputs, targets in dataset.prefetch(4):
            if not take(torch.from_dlpack(inputs), torch.from_dlpack(targets)):
                return


WAYS = {"tf.data service": run}
