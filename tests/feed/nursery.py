"""A process that starts loaders for tests, each a fork of itself: torch is imported once, no thread of a test forked.

Reads a JSON object a line: {"dataset", "batch_size", "link", "workers", "settings", "log", "namespace", "home"},
where both ways to send are to be tried "spare_cores", where frames are to be sent aside whatever is quicker "aside";
answers with the loader's process id.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.feed.datasets import make_dataset, make_plan
from tests.feed.namespaces import enter

from distributed_training.config import CheckpointConfig
from distributed_training.feed import Loader, LoaderSettings, gathering, helper_choice, outbox
from distributed_training.feed.answering import HomeDoor
from distributed_training.feed.homecoming.home import Home
from distributed_training.runtime.errors import DistributedTrainingError


def main() -> None:
    """Obey until standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the loaders here
    for line in sys.stdin:
        order = json.loads(line)
        process = os.fork()
        if process == 0:
            _load(order)
        sys.stdout.write(f"{process}\n")
        sys.stdout.flush()


def _load(order: dict) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(0)
    logging.basicConfig(level=logging.INFO, force=True)
    code = 1
    try:
        if order["namespace"] is not None:
            enter(order["namespace"])
        dataset = make_dataset(order["dataset"])
        plan = make_plan(dataset, order["batch_size"])
        settings = LoaderSettings(**{"first_pause": 0.02, "longest_pause": 0.1, **order["settings"]})
        home = None
        if order.get("home"):
            home = Home(Path(order["home"]), "copy", CheckpointConfig(), limit=1 << 30, always=True)
        if "spare_cores" in order:
            helper_choice._CORES = helper_choice._CORES_IF_QUICK = order["spare_cores"]
            helper_choice._FRAMES, helper_choice._SECONDS = 2, 0.0
            gathering._LARGE = 1
        if order.get("aside"):
            helper_choice._CORES, helper_choice._CORES_IF_QUICK, helper_choice.LARGE, outbox.LARGE = 1, 1, 1, 1
            helper_choice._FRAMES, helper_choice._SECONDS, helper_choice._GAIN = 1, 0.0, 0.0
        Loader(dataset, plan, _way(order["link"]), workers=order["workers"], settings=settings, home=home).run()
        code = 0
    except DistributedTrainingError as error:
        logging.error("ended: %s", error)
        code = error.exit_code
    except BaseException:
        logging.exception("ended")
    logging.info("exit code %d", code)
    os._exit(code)


def _way(link: Any) -> Any:
    """The links of the GPU side; of "listen HOST PORT" the door at which it calls, whose link goes into the log."""
    if not str(link).startswith("listen "):
        return link
    _, host, port = link.split()
    door = HomeDoor(host, int(port))
    logging.info("link %s", door.link("127.0.0.1"))
    return door


if __name__ == "__main__":
    main()
