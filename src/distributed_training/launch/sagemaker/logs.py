"""A job followed to its end: what its machines write, and what SageMaker says of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from distributed_training.launch.sagemaker.aws import Aws, error_code, explained
from distributed_training.runtime.errors import CloudError

GROUP = "/aws/sagemaker/TrainingJobs"
ENDED = ("Completed", "Failed", "Stopped")
_PAUSE = 5.0  # seconds between two looks
_LAST_WORDS = 3  # looks more after the end: the last lines come late
_QUEUE = 24 * 3600.0  # seconds in which an ordinary job gets its machines and returns its model
Say = Callable[[str], None]


class LogReader:
    """The log streams of a job, one a machine, read on from where they were read last."""

    def __init__(self, aws: Aws, job: str) -> None:
        self._aws, self._job = aws, job
        self._read_to: dict[str, str | None] = {}
        self._denied = False

    def new_lines(self) -> Iterator[str]:
        """Lines that have come since the last call, with the machine's name before each."""
        if self._denied:
            return
        from botocore.exceptions import ClientError

        try:
            for stream in self._streams():
                yield from self._new_lines_of(stream)
        except ClientError as error:
            if error_code(error) == "ResourceNotFoundException":  # nothing has been written yet
                return
            if "AccessDenied" not in error_code(error):
                raise
            self._denied = True
            yield (
                "its log cannot be shown: your user needs logs:DescribeLogStreams and logs:GetLogEvents on "
                f"{GROUP} (docs/sagemaker.md#permissions)"
            )

    def _streams(self) -> list[str]:
        pages = self._aws.client("logs").get_paginator("describe_log_streams")
        found = pages.paginate(logGroupName=GROUP, logStreamNamePrefix=f"{self._job}/")
        return [stream["logStreamName"] for page in found for stream in page["logStreams"]]

    def _new_lines_of(self, stream: str) -> Iterator[str]:
        machine = stream.partition("/")[2].rsplit("-", 1)[0]
        while True:
            token = self._read_to.get(stream)
            more = {"nextToken": token} if token else {}
            page = self._aws.client("logs").get_log_events(
                logGroupName=GROUP, logStreamName=stream, startFromHead=True, **more
            )
            for event in page["events"]:
                for line in event["message"].splitlines() or [""]:
                    yield f"[{machine}] {line}"
            self._read_to[stream] = page["nextForwardToken"]
            if not page["events"]:
                return


def describe(aws: Aws, job: str) -> dict[str, Any]:
    """What SageMaker says of a job."""
    with explained(f"asking about job {job}", "sagemaker:DescribeTrainingJob"):
        return dict(aws.client("sagemaker").describe_training_job(TrainingJobName=job))


def follow(aws: Aws, job: str, say: Say, longest: float) -> dict[str, Any]:
    """Show the log until the job has ended; its last description. `longest` is the time that the job may take."""
    end = time.monotonic() + longest + _QUEUE
    reader, told = LogReader(aws, job), 0
    while True:
        state = describe(aws, job)
        told = _say_news(state, told, say)
        ended = state["TrainingJobStatus"] in ENDED
        for _ in range(_LAST_WORDS if ended else 1):
            with explained(f"reading the log of job {job}", "logs:GetLogEvents"):
                for line in reader.new_lines():
                    say(line)
            time.sleep(_PAUSE if not ended else _PAUSE / _LAST_WORDS)
        if ended:
            return state
        if time.monotonic() > end:
            raise CloudError(
                f"job {job} has not ended after {longest + _QUEUE:.0f} s, which is more than it may take; it is left "
                "alone"
            )


def _say_news(state: dict[str, Any], told: int, say: Say) -> int:
    """The steps of the job's life that are new: Starting, Downloading, Training, Interrupted, ..."""
    steps = state.get("SecondaryStatusTransitions", [])
    for step in steps[told:]:
        message = step.get("StatusMessage", "")
        say(f"{step['Status']}{': ' + message if message else ''}")
    return max(told, len(steps))
