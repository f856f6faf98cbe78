"""Starting the shared feed of a search: one service on every machine that trials may run on."""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from distributed_training.config import Config
from distributed_training.data.sources import DATASETS
from distributed_training.runtime.errors import ConfigError, DataError
from distributed_training.tuning.shared_feed.messages import new_name

logger = logging.getLogger(__name__)

_QUICK = tuple(name for name in DATASETS if name not in ("images", "huggingface"))
"""Datasets that lie in memory or are computed in no time: without preprocessing there is nothing to pay once."""
_ENDING = 5.0  # seconds
_MODULE = "distributed_training.tuning.shared_feed"


class SharedFeed:
    """The feed of a search, for as long as it is entered. Where trials are to load for themselves, `name` is None.

    with SharedFeed(config, ray) as feed:
        ...  # trials get `feed.name`, and their data from `SharedData(feed.name, config)`
    """

    def __init__(self, config: Config, ray: Any = None) -> None:
        """`ray`: the module, connected, where trials may run on other machines of its cluster."""
        self._config, self._ray = config, ray
        self.name: str | None = None
        """What trials know it by."""
        self.why = ""
        """Why there is none."""
        self._process: ServiceProcess | None = None
        self._hosts: list[Any] = []

    def __enter__(self) -> SharedFeed:
        wish = self._config.tuning.share_feed
        if wish == "off" or (wish == "auto" and not worth_a_try(self._config)):
            self.why = "tuning.share_feed is off" if wish == "off" else "the samples are quickly loaded"
            return self
        name = new_name()
        spec = _spec(self._config, name)
        try:
            self._start(spec)
            answers = self._answers(self._config.run.deadline)
        except BaseException:
            self.close()
            raise
        self._judge(name, answers)
        return self

    def _start(self, spec: dict[str, Any]) -> None:
        """One here, and one on each other machine of the cluster."""
        here, elsewhere = machines(self._ray) if self._ray is not None else (True, [])
        if here:
            self._process = ServiceProcess(spec)
        if elsewhere:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            host = self._ray.remote(num_cpus=0, max_restarts=3)(ServiceHost)
            for node in elsewhere:
                where = NodeAffinitySchedulingStrategy(node, soft=False)
                self._hosts.append(host.options(scheduling_strategy=where).remote(spec))

    def _answers(self, deadline: float) -> list[dict[str, Any]]:
        """What the services say, of those that say something in time."""
        answers, end = [], time.monotonic() + deadline
        if self._process is not None:
            answers.append(self._process.answer(deadline))
        for host in self._hosts:
            try:
                answers.append(self._ray.get(host.ready.remote(deadline), timeout=max(1.0, end - time.monotonic())))
            except self._ray.exceptions.RayError as error:
                answers.append({"serves": False, "why": str(error).strip().splitlines()[-1]})
        return answers

    def _judge(self, name: str, answers: list[dict[str, Any]]) -> None:
        for answer in answers:
            if error := answer.get("error"):
                self.close()
                raise DataError(str(error))
        if any(answer["serves"] for answer in answers):
            self.name = name
            logger.info("trials share one feed on %d machines", sum(bool(answer["serves"]) for answer in answers))
            return
        self.why = str(answers[0].get("why", ""))
        self.close()
        if self._config.tuning.share_feed == "on":
            raise ConfigError(
                f"tuning.share_feed=on, but these samples cannot be shared: {self.why}; set it to auto or off"
            )

    def close(self) -> None:
        """End the services: trials that still run load for themselves from here on. Safe to call twice."""
        if self._process is not None:
            self._process.close()
            self._process = None
        for host in self._hosts:
            with suppress(Exception):  # it may be gone already, or Ray
                self._ray.kill(host)
        self._hosts = []

    def __exit__(self, *exc: object) -> None:
        self.close()


class ServiceProcess:
    """The process of a service on this machine. It ends with this one."""

    def __init__(self, spec: dict[str, Any]) -> None:
        dies = threading.current_thread() is threading.main_thread()  # else it would end with the thread
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it says nothing, then, and that is noticed
            self._process.stdin.write(json.dumps({**spec, "dies": dies}, default=str).encode() + b"\n")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def answer(self, deadline: float) -> dict[str, Any]:
        """What it says of itself when it has loaded the data."""
        assert self._process.stdout is not None
        line, end = b"", time.monotonic() + deadline
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    return {"serves": False, "why": f"the service was not ready within {deadline:g} s (run.deadline)"}
                some = os.read(self._process.stdout.fileno(), 65536)
                if not some:
                    return {"serves": False, "why": f"the service ended with code {self._process.wait(_ENDING)}"}
                line += some
        said: dict[str, Any] = json.loads(line)
        return said

    def wait(self) -> int:
        """Its exit code, when it has one."""
        return self._process.wait()

    def close(self) -> None:
        """Have it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()  # its lifeline
        for end in (self._process.terminate, self._process.kill):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING)
                break
            end()
        self._process.wait()
        self._process.stdout.close()


class ServiceHost:
    """A Ray actor that has the service of its machine. Ray starts it again if it dies."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._process = ServiceProcess({**spec, "path": sys.path})
        self._said: dict[str, Any] | None = None

    def ready(self, deadline: float) -> dict[str, Any]:
        """What the service says of itself."""
        if self._said is None:
            self._said = self._process.answer(deadline)
            if self._said["serves"] and not self._said.get("why"):
                threading.Thread(target=self._end_with_it, name="service", daemon=True).start()
        return self._said

    def _end_with_it(self) -> None:
        self._process.wait()
        os._exit(1)  # so that Ray makes both anew


def machines(ray: Any) -> tuple[bool, list[str]]:
    """(whether trials may run on this machine, a node on each other machine of the cluster)."""
    from distributed_training.launch.ray_cluster import nodes

    here = not ray.util.client.ray.is_connected()  # else this process is none of the cluster's
    own = ray.util.get_node_ip_address() if here else ""
    return here, list({node.address: node.id for node in nodes(ray) if node.address != own}.values())


def worth_a_try(config: Config) -> bool:
    """Whether it may take a while to load a sample: what can be said without loading one."""
    return config.data.preprocess is not None or config.data.dataset not in _QUICK


def _spec(config: Config, name: str) -> dict[str, Any]:
    """What a service needs to know."""
    return {
        "name": name,
        "config": {"data": config.to_dict()["data"], "run": {"deadline": config.run.deadline}},
        "always": config.tuning.share_feed == "on",
        "memory": config.tuning.feed_memory_mb << 20,
        "workers": config.tuning.feed_workers,
        "folder": os.getcwd(),
        "path": sys.path,
    }
