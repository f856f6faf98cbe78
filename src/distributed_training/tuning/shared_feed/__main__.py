"""The process of a service: `python -m distributed_training.tuning.shared_feed`, started by `starting.py`.

What it is to serve comes as JSON on the first line of its input, which stays open as long as it is wanted. It answers
with one line of JSON: that it serves, or why it does not.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import torch

from distributed_training.config import Config
from distributed_training.data.base import Dataset
from distributed_training.data.torch_dataset import fetch
from distributed_training.feed.columns import Unkept, take_apart
from distributed_training.runtime.errors import DistributedTrainingError
from distributed_training.runtime.signals import end_with_parent
from distributed_training.training.job import load_data
from distributed_training.tuning.shared_feed.messages import Message, address_of, data_identity, make_socket
from distributed_training.tuning.shared_feed.rows import RowStore, sample_width
from distributed_training.tuning.shared_feed.service import Service, end_quietly
from distributed_training.tuning.shared_feed.shelves import Shelf
from distributed_training.tuning.shared_feed.worker import Stock
from distributed_training.tuning.shared_feed.workers import Workers

_TRIED = 16  # samples
_WORTH = 100e-6  # seconds a sample from which on it is worth sharing: to ask for one and copy it takes some, too
_MOST_PAGES = 1024


def main() -> None:
    """Serve until the input ends."""
    logging.basicConfig(level=logging.WARNING, format="shared feed: %(message)s")
    spec = json.loads(sys.stdin.readline())
    if spec["dies"]:
        end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal; the search decides
    signal.signal(signal.SIGTERM, end_quietly)
    sys.path[:] = [*spec["path"], *[place for place in sys.path if place not in spec["path"]]]
    os.chdir(spec["folder"])
    torch.set_num_threads(1)
    try:
        config = Config.from_dict(spec["config"], "search")
        listener = make_socket()
        try:
            listener.bind(address_of(spec["name"]))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                _say(serves=True, why="another process of this machine does")
                return
            raise
        data = load_data(config)
        parts = {"train": data.train} | ({"validation": data.validation} if data.validation is not None else {})
        why = _why_not(parts, spec["always"])
        if why is not None:
            _say(serves=False, why=why)
            return
        stocks = _stocks(parts, min(spec["memory"], _available() // 2))
    except Unkept as error:
        _say(serves=False, why=str(error))
        return
    except DistributedTrainingError as error:
        _say(serves=False, error=str(error))
        return
    shelves = {part: Shelf(len(stock.dataset), stock.rows.slots) for part, stock in stocks.items()}
    facts = {part: _facts(stock) for part, stock in stocks.items()}
    identity = data_identity(config)

    def welcome(hello: Message) -> tuple[Message, list[int]]:
        if hello["identity"] != identity:
            return {"refused": "the data of this trial is other than that of the search"}, []
        return {"parts": facts}, [stock.rows.fd for stock in stocks.values()]

    count = spec["workers"] or len(os.sched_getaffinity(0))
    listener.listen(1024)
    _say(serves=True)
    with listener:
        Service(listener, shelves, welcome, Workers(stocks, count, config.run.deadline)).run(sys.stdin.fileno())
    os._exit(0)  # nothing is left to be done, and to take apart all that was imported takes seconds


def _say(**answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _why_not(parts: dict[str, Dataset], always: bool) -> str | None:
    """Why samples are not shared; None where they are."""
    for part, dataset in parts.items():
        if not dataset.alone:
            return f"a batch of the {part} data may be more than its samples side by side"
    if always:
        return None
    train = parts["train"]
    if train.rows(np.zeros(1, np.int64)) is not None:
        return "the samples lie in memory, and are quickly gathered by each trial"
    ids = np.unique(np.linspace(0, len(train) - 1, _TRIED).astype(np.int64))
    fetch(train, ids, 0)  # the first time is no measure
    began = time.perf_counter()
    fetch(train, ids, 0)
    each = (time.perf_counter() - began) / len(ids)
    return f"a sample takes only {each * 1e6:.0f} us to load" if each < _WORTH else None


def _stocks(parts: dict[str, Dataset], memory: int) -> dict[str, Stock]:
    """Memory for each part: held-out samples have as much as they need, up to their share."""
    shapes = {part: take_apart(fetch(dataset, np.zeros(1, np.int64), 0), 1)[0] for part, dataset in parts.items()}
    widths = {part: sample_width(shape) for part, shape in shapes.items()}
    whole = sum(len(dataset) * widths[part] for part, dataset in parts.items())
    stocks, left = {}, memory
    for part, dataset in sorted(parts.items(), key=lambda item: item[0] == "train"):
        size = len(dataset) * widths[part]
        room = left if part == "train" else min(size, memory * size // whole)
        slots = max(1, min(room // widths[part], len(dataset) * _MOST_PAGES))
        left -= slots * widths[part]
        stocks[part] = Stock(dataset, RowStore(shapes[part], slots))
    return {part: stocks[part] for part in parts}


def _available() -> int:
    """Bytes of memory that are free, or can be made so."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        found = next((line for line in lines if line.startswith("MemAvailable:")), None)
    return int(found.split()[1]) << 10 if found is not None else 1 << 40


def _facts(stock: Stock) -> Message:
    dataset = stock.dataset
    return {
        "samples": len(dataset),
        "fingerprint": dataset.fingerprint(),
        "num_classes": dataset.num_classes,
        "classes": dataset.classes,
        "input_shape": list(dataset.input_shape) if dataset.input_shape is not None else None,
        "shape": stock.rows.shape,
        "slots": stock.rows.slots,
    }


if __name__ == "__main__":
    main()
