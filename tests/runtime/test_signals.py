"""Ctrl-C and SIGTERM: the first is a wish, the second acts as always, and nothing stays changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from distributed_training.runtime.signals import StopSignals, held_back

BOTH = [signal.SIGINT, signal.SIGTERM]


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in BOTH]


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = handlers()
    yield
    assert handlers() == before


@pytest.mark.parametrize("number", BOTH)
def test_the_first_signal_only_sets_received(number: signal.Signals) -> None:
    with StopSignals() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == number


@pytest.mark.parametrize("first", BOTH)
def test_a_second_signal_acts_as_it_always_did(first: signal.Signals) -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), first)
        assert stop.received == first
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_of_others_are_put_back_and_get_the_second_signal() -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        own = signal.getsignal(signal.SIGTERM)
        with StopSignals():
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert seen == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_handlers_are_put_back_after_an_error() -> None:
    before = handlers()
    with pytest.raises(KeyError), StopSignals():
        raise KeyError(handlers())
    assert handlers() == before


def test_a_signal_that_is_held_back_acts_when_the_work_is_done() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (the order is the point)
        with held_back():
            os.kill(os.getpid(), signal.SIGINT)
            done.append("first")
            done.append("second")
        done.append("too late")
    assert done == ["first", "second"]
    with held_back():  # none came
        done.append("third")
    assert len(done) == 3


def test_can_be_entered_again() -> None:
    stop = StopSignals()
    with stop:
        pass
    with stop:
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.received == signal.SIGINT


def test_is_harmless_in_another_thread() -> None:
    before, seen = handlers(), []

    def enter() -> None:
        with StopSignals() as stop:
            seen.append((handlers() == before, stop.received))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(True, None)]


def test_a_second_sigterm_ends_the_process() -> None:
    program = """
import os, signal
from distributed_training.runtime.signals import StopSignals
with StopSignals() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    print(stop.received.name, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here")
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "SIGTERM\n"
    assert result.returncode == -signal.SIGTERM


def test_another_thread_sees_a_signal_while_the_main_thread_runs_no_python_code() -> None:
    program = """
import ctypes, os, signal, threading, time
from distributed_training.runtime.signals import StopSignals
with StopSignals() as stop:
    def watch():
        time.sleep(1)  # the main thread is in C by then
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.arrived:
            time.sleep(0.01)
        print(stop.arrived, stop.received, flush=True)
        os._exit(7)
    threading.Thread(target=watch).start()
    lock = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(lock)
    ctypes.CDLL(None).pthread_mutex_lock(lock)  # waits for ever, and no signal ends it
"""
    # Not measured by coverage, under which it was seen to hang now and then.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    result = subprocess.run(
        [sys.executable, "-c", program], env=plain, capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.stdout, result.returncode) == ("True None\n", 7), result.stderr
