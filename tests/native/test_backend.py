"""The backend over MPI, under the real mpirun: every operation, what torch builds on it, and failures that speak."""

from __future__ import annotations

import re

import psutil
import pytest
from tests.launching import run_mpi

CHECKS = "tests/native/ranks/backend_checks.py"
IN_RANKS = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
ONE_HOST: dict[str, str] = {}
PLAIN_MPI = {"DTRAIN_MPI_SHARED_MEMORY": "0"}
PRETENDED_HOSTS = {"DTRAIN_MPI_RANKS_PER_HOST": "2"}  # two hosts of two ranks, or one of two and one of one


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        pytest.param(2, ONE_HOST, id="one-host-of-two"),
        pytest.param(4, ONE_HOST, id="one-host-of-four"),
        pytest.param(2, PLAIN_MPI, id="plain-mpi"),
        pytest.param(4, PRETENDED_HOSTS, id="two-hosts-of-two"),
        pytest.param(3, PRETENDED_HOSTS, id="hosts-of-two-and-one"),
    ],
)
def test_every_operation(ranks: int, way: dict[str, str]) -> None:
    run_mpi(ranks, [*IN_RANKS, CHECKS], **way)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "way"), [(2, ONE_HOST), (4, PRETENDED_HOSTS)], ids=["one-host", "two-hosts"])
def test_what_torch_builds_on_it(ranks: int, way: dict[str, str]) -> None:
    run_mpi(ranks, [*IN_RANKS, "tests/native/ranks/torch_checks.py"], **way)


def trouble(what: str, ranks: int, way: dict[str, str], who: int = 1) -> tuple[dict[int, str], dict[int, str], str]:
    """What each rank learned from the operation that went wrong, and from the next one."""
    done = run_mpi(ranks, ["-m", "tests.native.ranks.trouble", what, str(who)], check=False, timeout=90, **way)
    said = done.stdout + done.stderr
    assert done.returncode != 0, said
    found = re.findall(r"RANK (\d) (first|second) (.*)", said)
    learned = [{int(rank): text for rank, which, text in found if which == wanted} for wanted in ("first", "second")]
    return learned[0], learned[1], said


@pytest.mark.skipif(psutil.virtual_memory().available < 12 * 2**30, reason="needs 12 GB of memory")
def test_more_than_2_to_the_31_elements() -> None:
    run_mpi(2, ["-m", "tests.native.ranks.long_tensor"])


WAYS = pytest.mark.parametrize(
    ("ranks", "way"),
    [pytest.param(2, ONE_HOST, id="one-host"), pytest.param(2, PLAIN_MPI, id="plain-mpi")],
)


class TestMismatches:
    @WAYS
    @pytest.mark.parametrize(
        ("what", "theirs", "ours"),
        [
            ("another_size", "all_reduce(sum) of 1,001 float32", "all_reduce(sum) of 1,000 float32"),
            ("another_type", "all_reduce(sum) of 1,000 float64", "all_reduce(sum) of 1,000 float32"),
            ("another_operation", "all_gather of 40 bytes", "all_reduce(sum) of 10 float32"),
        ],
    )
    def test_both_sides_name_both(self, what: str, theirs: str, ours: str, ranks: int, way: dict[str, str]) -> None:
        first, second, said = trouble(what, ranks, way)
        assert len(first) == ranks, said
        for text in first.values():
            assert theirs in text, said
            assert ours in text, said
        for text in second.values():
            assert "broken by an earlier failure" in text, said

    def test_long_messages_between_hosts(self) -> None:
        first, _, said = trouble("another_long_size", 4, PRETENDED_HOSTS)
        assert len(first) == 4, said
        for text in first.values():
            assert "1,000,001" in text, said
            assert "1,000,000" in text, said

    def test_pieces_of_an_all_to_all(self) -> None:
        first, _, said = trouble("pieces_that_differ", 2, ONE_HOST)
        assert any("all_to_all of 8 bytes" in text and "all_to_all of 4 bytes" in text for text in first.values()), said


class TestRanksThatAreLost:
    @WAYS
    def test_one_that_dies_ends_the_job(self, ranks: int, way: dict[str, str]) -> None:
        _, _, said = trouble("dies", ranks, way)
        assert re.search(r"rank 1 .*signal 9", said, re.DOTALL), said

    @pytest.mark.parametrize(
        ("ranks", "way", "who"),
        [
            pytest.param(2, ONE_HOST, 1, id="one-host"),
            pytest.param(2, PLAIN_MPI, 1, id="plain-mpi"),
            pytest.param(4, PRETENDED_HOSTS, 1, id="two-hosts"),
            pytest.param(4, PRETENDED_HOSTS, 2, id="two-hosts-the-one-that-speaks-for-the-second"),
        ],
    )
    def test_one_that_stands_still_is_named(self, ranks: int, way: dict[str, str], who: int) -> None:
        first, second, said = trouble("hangs", ranks, way, who)
        first.pop(who, None)  # mpirun wakes it before it ends it
        assert sorted(first) == [rank for rank in range(ranks) if rank != who], said
        for text in first.values():
            assert re.search(r"all_reduce \(number \d+ of group '\S*'\) failed on rank \d", text), said
            assert re.search(rf"\brank {who}\b(?! gave up)", text.partition("failed on rank")[2][2:]), said
        assert all("broken by an earlier failure" in text for text in second.values()), said

    def test_one_that_does_not_come_is_named(self) -> None:
        first, _, said = trouble("does_not_come", 2, ONE_HOST)
        assert "rank 1" in first[0].partition("failed on rank")[2], said

    def test_a_message_that_never_comes(self) -> None:
        first, _, said = trouble("nobody_sends", 2, ONE_HOST)
        assert re.search("recv from rank 1 .* no answer in time from rank 1", first[0]), said

    @WAYS
    def test_one_that_aborts_tells_the_others(self, ranks: int, way: dict[str, str]) -> None:
        first, _, said = trouble("gives_up", ranks, way)
        assert "the group was aborted on rank 1" in first[0], said
