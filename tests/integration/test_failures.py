"""Whatever happens to one rank: the whole job ends soon, and the screen says which rank it was and why."""

from __future__ import annotations

import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
import torch
from tests.forked_ranks import RankServer
from tests.launching import ROOT, free_port, run_ranks

from distributed_training.checkpoint import read_state, verify

PROGRAM = str(Path(__file__).parent / "trouble.py")
pytestmark = pytest.mark.timeout(400)  # jobs take seconds, on a machine that has them to itself


def reports(screen: str) -> dict[int, str]:
    """What each rank said of the others."""
    said: dict[int, str] = {}
    for line in screen.splitlines():
        if match := re.match(r"\[rank (\d+)\] (.*)", line):
            said[int(match.group(1))] = said.get(int(match.group(1)), "") + match.group(2) + "\n"
    return said


def assert_all_failed(codes: list[int | None], screen: str) -> None:
    assert all(code not in (0, None) for code in codes), (codes, screen)


class TestErrors:
    @pytest.mark.parametrize(
        ("kind", "who", "message"),
        [
            ("error", 1, "OwnError: the user's own mistake"),
            ("error", 0, "OwnError: the user's own mistake"),
            ("error-closed", 1, "OwnError: the user's own mistake"),
            ("error-in-data", 2, "OwnError: the user's own mistake"),
            ("bad-sample", 1, "cannot be read"),
            ("network", 1, "ConnectionResetError: Connection reset by peer"),  # of the user's, not of a lost rank
            ("memory", 1, "docs/troubleshooting.md#out-of-memory-on-some-gpus"),
            ("device-memory", 2, "docs/troubleshooting.md#out-of-memory-on-some-gpus"),
        ],
    )
    def test_an_error_of_one_rank_ends_all_and_is_last_on_the_screen(
        self, rank_server: RankServer, kind: str, who: int, message: str
    ) -> None:
        codes, screen = rank_server.start(3, [PROGRAM, kind, str(who)]).end()
        assert_all_failed(codes, screen)
        told = [line for line in screen.splitlines() if "has done step" not in line]
        assert told[-1].startswith(f"rank {who} of 3 (")
        assert message in told[-1]
        assert sum(" failed: " in line for line in told) == 1  # the others have nothing to say
        if kind != "bad-sample":  # there the message says it all
            assert told[0] == "Traceback (most recent call last):"
            assert any("raise_" in line for line in told)

    def test_the_same_error_on_all_ranks_is_shown_once(self, rank_server: RankServer) -> None:
        codes, screen = rank_server.start(3, [PROGRAM, "other-config", "1"]).end()
        assert_all_failed(codes, screen)
        assert screen.count("training.lr is 0.05 on ranks 0, 2 and 0.06 on rank 1") == 1
        assert screen.count(" failed: ") == 1


class TestGone:
    @pytest.mark.parametrize("who", [0, 1])  # rank 0 keeps the meeting point
    def test_a_killed_rank_is_named_by_the_others(self, rank_server: RankServer, tmp_path: Path, who: int) -> None:
        words = ["workers=2", "name=killed", "save=1"]
        job = rank_server.start(3, [PROGRAM, "kill", str(who), *words], PWD=str(tmp_path))
        codes, screen = job.end()
        assert codes[who] == -signal.SIGKILL
        assert_all_failed(codes, screen)
        said = reports(screen)
        assert said.keys() == {0, 1, 2} - {who}
        for text in said.values():
            assert f"rank {who} (" in text
            assert f"process {job.pids[who]}" in text
            assert "is gone: killed, as the system does when memory runs out" in text
            assert "#a-rank-is-gone" in text
        for path in (tmp_path / "runs" / "killed" / "checkpoints").glob("step-*"):
            verify(path)  # whole, or not there
        loaders = {int(pid) for pid in re.findall(r"loader process (\d+)", screen)}
        assert loaders
        end = time.monotonic() + 30
        while any(psutil.pid_exists(pid) for pid in loaders):
            assert time.monotonic() < end, "loader processes were left behind"
            time.sleep(0.05)

    def test_a_rank_whose_program_ended_is_named(self, rank_server: RankServer) -> None:
        codes, screen = rank_server.start(2, [PROGRAM, "leave", "1"]).end()
        assert codes == [75, 0]
        assert re.search(r"rank 1 \(.*\) has ended, but others still wait", reports(screen)[0])


class TestHangs:
    @pytest.mark.parametrize(
        ("kind", "operation", "line"),
        [
            ("hang", "the mean loss of all ranks", '"hang": lambda: time.sleep(1000)'),
            ("hang-in-c", "the mean loss of all ranks", "ctypes.CDLL(None).sleep(1000)"),
            ("hang-in-data", "gathering values of all ranks", "time.sleep(1000)"),
        ],
    )
    def test_every_rank_says_who_is_missing_and_where_it_stands(
        self, rank_server: RankServer, kind: str, operation: str, line: str
    ) -> None:
        codes, screen = rank_server.start(3, [PROGRAM, kind, "1"]).end()
        assert codes == [75, 75, 75], f"{codes} {screen}"
        said = reports(screen)
        assert said.keys() == {0, 1, 2}
        for text in said.values():
            assert f"no progress for 6 s (run.deadline) in {operation}" in text
            assert re.search(r"rank 1 \(.*\) has not arrived", text)
            assert re.search(r"\n  rank 1 is past ", text)
            assert line in text
            assert re.search(r"\n  ranks 0, 2 are waiting in ", text)
            assert "trouble.py" in text
            assert "#a-rank-hangs-or-never-arrives" in text

    def test_a_rank_whose_loader_processes_hang_says_so(self, rank_server: RankServer) -> None:
        codes, screen = rank_server.start(3, [PROGRAM, "hang-in-loader", "1"]).end()
        assert_all_failed(codes, screen)
        # To end the loader processes takes some seconds, too: if the others give up first, they see where it stands.
        assert re.search(r"rank 1 of 3 .* no batch from the loader processes within 3.6 s|from loader\.py", screen)

    @pytest.mark.parametrize("who", [0, 1])
    def test_a_stopped_rank_is_reported_as_silent_and_ends_when_it_goes_on(
        self, rank_server: RankServer, who: int
    ) -> None:
        job = rank_server.start(3, [PROGRAM, "stop", str(who), "deadline=6"])
        others = {0, 1, 2} - {who}
        for rank in others:
            job.until(f"[rank {rank}] see docs")
        job.signal(who, signal.SIGCONT)
        codes, screen = job.end()
        assert_all_failed(codes, screen)
        for rank in others:
            assert f"rank {who} (" in reports(screen)[rank]
            assert "not answer: stopped" in reports(screen)[rank]

    def test_a_rank_that_lets_no_other_python_code_run_is_reported_as_silent(self, rank_server: RankServer) -> None:
        job = rank_server.start(2, [PROGRAM, "keep-python", "1", "deadline=6"])
        job.until("[rank 0] see docs")
        job.signal(1, signal.SIGKILL)
        codes, screen = job.end()
        assert codes == [75, -signal.SIGKILL]
        assert "not answer: stopped, out of reach, or in a call that lets no other Python code run" in screen

    def test_slow_work_below_the_deadline_is_no_alarm(self, rank_server: RankServer, tmp_path: Path) -> None:
        words = ["slow=6", "deadline=15", "parts=3", "save=1", "name=slow"]
        codes, screen = rank_server.start(2, [PROGRAM, "slow", "0", *words], PWD=str(tmp_path)).end()
        assert codes == [0, 0], f"{codes} {screen}"
        assert reports(screen) == {}


class TestStart:
    def test_a_rank_that_never_comes(self, rank_server: RankServer) -> None:
        codes, screen = rank_server.start(3, [PROGRAM, "none", "0", "deadline=4"], only=[0, 2]).end()
        assert_all_failed(codes, screen)
        assert screen.count("rank 1 had not come to 127.0.0.1:") == 2

    def test_nobody_at_the_master(self, rank_server: RankServer) -> None:
        port = str(free_port())
        codes, screen = rank_server.start(2, [PROGRAM, "none", "0", "deadline=3"], only=[1], MASTER_PORT=port).end()
        assert_all_failed(codes, screen)
        assert f"no answer from the master at 127.0.0.1:{port} within 3 s" in screen
        assert "#the-master-cannot-be-reached" in screen

    def test_a_master_that_does_not_even_refuse(self, rank_server: RankServer) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
            port = full.getsockname()[1]
            waiting = [socket.socket() for _ in range(4)]  # more than it takes: what comes now hears nothing
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", port))
            words = [PROGRAM, "none", "0", "deadline=3"]
            codes, screen = rank_server.start(2, words, only=[1], MASTER_PORT=str(port)).end()
            for one in waiting:
                one.close()
        assert_all_failed(codes, screen)
        assert f"no answer from the master at 127.0.0.1:{port} within 3 s" in screen

    def test_something_else_at_the_masters_port(self, rank_server: RankServer) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = str(other.getsockname()[1])
            codes, screen = rank_server.start(2, [PROGRAM, "none", "0", "deadline=3"], MASTER_PORT=port).end()
        assert_all_failed(codes, screen)
        assert f"port {port} is in use on" in screen
        assert "#port-in-use" in screen
        assert f"something listens at 127.0.0.1:{port}, but it is not rank 0 of this job" in screen

    def test_an_address_that_does_not_lead_to_rank_0(self, rank_server: RankServer) -> None:
        words = [PROGRAM, "none", "0", "deadline=3"]
        codes, screen = rank_server.start(2, words, only=[0], MASTER_ADDR="255.255.255.255").end()
        assert_all_failed(codes, screen)
        assert "MASTER_ADDR=255.255.255.255 does not lead there" in screen

    def test_two_processes_of_one_rank(self, rank_server: RankServer) -> None:
        codes, screen = rank_server.start(3, [PROGRAM, "none", "0", "deadline=60"], only=[0, 1, 1]).end()
        assert_all_failed(codes, screen)
        assert "two processes call themselves rank 1" in screen
        assert "#ranks-differ" in screen

    def test_different_numbers_of_ranks(self, rank_server: RankServer, tmp_path: Path) -> None:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PWD": str(tmp_path)}
        environments = [{**common, "RANK": str(rank), "WORLD_SIZE": str(size)} for rank, size in ((0, 3), (1, 2))]
        words = [PROGRAM, "none", "0", "deadline=60"]
        codes, screen = rank_server.start_all(environments, words, tmp_path / "screen").end()
        assert_all_failed(codes, screen)
        assert "jobs of different sizes" in screen
        assert "WORLD_SIZE=3" in screen
        assert "WORLD_SIZE=2" in screen

    @pytest.mark.parametrize(
        ("kind", "difference"),
        [
            ("other-model", r"parameter layers\.0\.weight is \[8, 6\].* on rank 0 and \[9, 6\].* on rank 1"),
            ("other-data", r"data: dataset is '\w+' on rank 0 and '\w+' on rank 1"),
        ],
    )
    def test_ranks_that_differ_are_refused(self, rank_server: RankServer, kind: str, difference: str) -> None:
        codes, screen = rank_server.start(2, [PROGRAM, kind, "1"]).end()
        assert_all_failed(codes, screen)
        assert re.search(difference, screen)
        assert "#ranks-differ" in screen

    def test_the_command_line_ends_with_the_code_of_the_error(self, rank_server: RankServer, tmp_path: Path) -> None:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PWD": str(tmp_path), "WORLD_SIZE": "2"}
        environments = [{**common, "RANK": str(rank), "DTRAIN_TRAINING__LR": f"0.0{rank + 1}"} for rank in range(2)]
        words = ["-m", "distributed_training", "train", "strategy=ddp", "training.epochs=1", "run.progress=off"]
        codes, screen = rank_server.start_all(environments, words, tmp_path / "screen").end()
        assert codes == [7, 7], f"{codes} {screen}"
        assert "training.lr is 0.01 on rank 0 and 0.02 on rank 1" in screen


def test_one_rank_with_bad_numbers_makes_all_skip_the_step(rank_server: RankServer) -> None:
    codes, screen = rank_server.start(2, [PROGRAM, "nan", "0", "epochs=1"]).end()
    assert codes == [0, 0], f"{codes} {screen}"
    assert screen.count("completed after 8 steps, 1 skipped") == 2
    assert screen.count("the inputs of sample 41 are not finite") == 1


class TestSignals:
    @pytest.mark.parametrize("receivers", [[1], [0, 1]], ids=["one rank", "all ranks"])
    def test_all_stop_at_the_same_step_and_resume_exactly(
        self, rank_server: RankServer, tmp_path: Path, receivers: list[int]
    ) -> None:
        words = [PROGRAM, "none", "0", "epochs=3", "name=stopped", "resume=auto"]
        job = rank_server.start(2, [*words, "pace=0.3"], PWD=str(tmp_path))
        job.until("rank 1 has done step 5")
        for rank in receivers:
            job.signal(rank, signal.SIGTERM)
        codes, screen = job.end()
        assert codes == [143, 143], f"{codes} {screen}"
        steps = re.findall(r"interrupted after (\d+) steps", screen)
        assert len(steps) == 2
        assert steps[0] == steps[1]
        checkpoints = tmp_path / "runs" / "stopped" / "checkpoints"
        assert [read_state(path)["cursor"]["global_step"] for path in checkpoints.glob("step-*")] == [int(steps[0])]
        codes, screen = rank_server.start(2, words, PWD=str(tmp_path)).end()
        assert codes == [0, 0], f"{codes} {screen}"
        assert f"has done step {int(steps[0]) + 1}" in screen
        assert f"has done step {steps[0]}\n" not in screen
        codes, screen = rank_server.start(2, [*words[:-2], "name=whole"], PWD=str(tmp_path)).end()
        assert codes == [0, 0], f"{codes} {screen}"
        resumed, whole = (
            read_state(max((tmp_path / "runs" / run / "checkpoints").glob("step-*")))["model"]
            for run in ("stopped", "whole")
        )
        assert all(torch.equal(resumed[key], whole[key]) for key in whole)

    def test_a_rank_told_to_stop_while_another_stands_still_ends_by_itself(self, rank_server: RankServer) -> None:
        job = rank_server.start(2, [PROGRAM, "stop", "1", "deadline=120"])
        job.until("rank 1 has done step 3")
        time.sleep(1)
        job.signal(0, signal.SIGTERM)
        job.until("told to stop, but rank 1 (")
        job.signal(1, signal.SIGCONT)
        codes, screen = job.end()
        assert codes[0] == 143
        assert_all_failed(codes, screen)


class TestTorchrun:
    @pytest.mark.parametrize(
        ("kind", "said", "cause"),
        [
            ("error", "rank 1 of 2 (", "OwnError: the user's own mistake"),
            ("kill", "[rank 0]", "Signal 9 (SIGKILL)"),
            ("hang", "[rank 0]   rank 1 is past", "has not arrived"),
        ],
    )
    def test_the_launcher_shows_the_cause(self, kind: str, said: str, cause: str) -> None:
        done = run_ranks(2, [PROGRAM, kind, "1"], check=False, timeout=300, PYTHONPATH=str(ROOT))
        assert done.returncode != 0
        output = done.stdout + done.stderr
        assert said in output
        assert cause in output.partition("Root Cause")[2], output[-6000:]
