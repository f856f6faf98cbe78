"""Failures of the backend over MPI, under the real mpirun: every rank hears of them, in time and by name."""

from __future__ import annotations

import re

import pytest
from tests.launching import run_mpi
from tests.native.test_backend import ONE_HOST, PLAIN_MPI, PRETENDED_HOSTS

Learned = dict[str, dict[int, str]]


def trouble(cases: list[str], ranks: int, way: dict[str, str]) -> tuple[Learned, Learned, str]:
    """What each rank learned in each case from the operation that went wrong, and from the next one."""
    done = run_mpi(ranks, ["-m", "tests.native.ranks.trouble", *cases], check=False, timeout=90, **way)
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    first: Learned = {case: {} for case in cases}
    second: Learned = {case: {} for case in cases}
    for rank, case, which, text in re.findall(r"RANK (\d) (\w+) (first|second) (.*)", said):
        (first if which == "first" else second)[case][int(rank)] = text
    return first, second, said


DIFFER = {
    "another_size": ("all_reduce(sum) of 1,001 float32", "all_reduce(sum) of 1,000 float32"),
    "another_long_size": ("all_reduce(sum) of 1,000,001 float32", "all_reduce(sum) of 1,000,000 float32"),
    "another_type": ("all_reduce(sum) of 1,000 float64", "all_reduce(sum) of 1,000 float32"),
    "another_operation": ("all_gather of 40 bytes", "all_reduce(sum) of 10 float32"),
    "another_piece": ("all_to_all of 8 bytes", "all_to_all of 4 bytes"),
    "another_host": ("all_gather of 40 bytes", "all_reduce(sum) of 10 float32"),
    "another_way": ("gather(root 0) of 40 bytes", "all_reduce(sum) of 10 float32"),
    "another_root": ("gather(root 0) of 40 bytes", "gather(root {other}) of 40 bytes"),
    "two_roots": ("broadcast(root 0) of 40 bytes", "broadcast(root {other}) of 40 bytes"),
}


@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        pytest.param(2, ONE_HOST, id="one-host"),
        pytest.param(2, PLAIN_MPI, id="plain-mpi"),
        pytest.param(4, PRETENDED_HOSTS, id="two-hosts"),
    ],
)
def test_calls_that_differ_are_named_on_every_rank(ranks: int, way: dict[str, str]) -> None:
    first, second, said = trouble([*DIFFER, "gives_up"], ranks, way)
    for case, calls in DIFFER.items():
        assert len(first[case]) == ranks, f"{case}: {said}"
        for text in first[case].values():
            assert all(call.format(other=ranks // 2) in text for call in calls), f"{case}: {said}"
            assert len(set(re.findall(r"rank (\d) called|this rank \((?:rank )?(\d)\)", text))) == 2, f"{case}: {said}"
        assert all("broken by an earlier failure" in text for text in second[case].values()), said
    assert "the group was aborted on rank 1" in first["gives_up"][0], said


def test_what_does_not_come_in_time_is_named() -> None:
    first, _, said = trouble(["does_not_come", "nobody_sends"], 2, ONE_HOST)
    assert re.search(r"failed on rank 0: .*\brank 1\b", first["does_not_come"][0]), said
    assert re.search(r"recv from rank 1 .*no answer in time from rank 1", first["nobody_sends"][0]), said


def test_a_rank_that_dies_ends_the_job() -> None:
    _, _, said = trouble(["dies"], 2, ONE_HOST)
    assert re.search(r"rank 1 .*signal 9", said, re.DOTALL), said


@pytest.mark.parametrize(
    ("ranks", "way", "case", "who"),
    [
        pytest.param(2, ONE_HOST, "hangs", 1, id="one-host"),
        pytest.param(2, PLAIN_MPI, "hangs", 1, id="plain-mpi"),
        pytest.param(4, PRETENDED_HOSTS, "the_second_host_hangs", 2, id="who-speaks-for-a-host"),
    ],
)
def test_a_rank_that_stands_still_is_named(ranks: int, way: dict[str, str], case: str, who: int) -> None:
    first, second, said = trouble([case], ranks, way)
    learned = {rank: text for rank, text in first[case].items() if rank != who}  # mpirun wakes it before it ends it
    assert sorted(learned) == [rank for rank in range(ranks) if rank != who], said
    for text in learned.values():
        assert re.search(r"all_reduce \(number \d+ of group '\S*'\) failed on rank \d", text), said
        assert re.search(rf"\brank {who}\b(?! gave up)", text.partition("failed on rank")[2][2:]), said
    assert all("broken by an earlier failure" in text for rank, text in second[case].items() if rank != who), said
