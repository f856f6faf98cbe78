"""`dtrain launch --hosts` over real ssh: two machines, each with an sshd and keys of the test's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.launch.networks import Machine, need, two_machines
from tests.launching import environment

from distributed_training import DistributedTrainingError
from distributed_training.launch.ssh import Place, forwarded, read_hosts

PROGRAMS = Path(__file__).parent / "programs"
PORT = "2222"
SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


@contextmanager
def ssh_server(machine: Machine, keys: Path) -> Iterator[None]:
    """An sshd that knows one key and listens on one machine's address."""
    assert SSHD is not None
    Path("/run/sshd").mkdir(exist_ok=True)  # where sshd drops its privileges; a system without the service lacks it
    settings = [
        f"Port={PORT}",
        f"ListenAddress={machine.address}",
        f"HostKey={keys / 'host'}",
        f"AuthorizedKeysFile={keys / 'user.pub'}",
        f"PidFile={keys / machine.name}.pid",
        "StrictModes=no",
        "PermitRootLogin=yes",
        "PasswordAuthentication=no",
        "UsePAM=no",
    ]
    options = [word for setting in settings for word in ("-o", setting)]
    command = [*machine.inside, SSHD, "-D", "-e", "-f", os.devnull, *options]
    with (keys / f"{machine.name}.log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Machine, Machine, str]]:
    """Two machines, and the ssh command that reaches them."""
    need("sshd (Debian package openssh-server)", SSHD is not None)
    need("ssh and ssh-keygen (Debian package openssh-client)", bool(shutil.which("ssh") and shutil.which("ssh-keygen")))
    keys = tmp_path_factory.mktemp("keys")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True, timeout=30)
    known = f"-o UserKnownHostsFile={keys / 'known'} -o StrictHostKeyChecking=accept-new"
    ssh = f"ssh -F none -p {PORT} -i {keys / 'user'} -o IdentitiesOnly=yes {known}"
    with two_machines() as machines, ExitStack() as stack:
        for machine in machines:
            stack.enter_context(ssh_server(machine, keys))
            _wait_until_reachable(machines[0], machine, ssh)
        yield (*machines, ssh)


def _wait_until_reachable(here: Machine, there: Machine, ssh: str) -> None:
    end = time.monotonic() + 20
    while True:
        done = subprocess.run([*here.inside, *ssh.split(), there.address, "true"], capture_output=True, timeout=30)
        if done.returncode == 0:
            return
        assert time.monotonic() < end, done.stderr.decode()
        time.sleep(0.2)


def launch(hosts: tuple[Machine, Machine, str], *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    one, two, ssh = hosts
    where = ["--hosts", f"{one.address},{two.address}", "--nproc", "1", "--ssh", ssh]
    command = [*one.inside, sys.executable, "-m", "distributed_training", "launch", *where, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment(**variables))


@pytest.mark.timeout(300)
def test_two_hosts_train_and_fail_together(in_tmp: Path, hosts: tuple[Machine, Machine, str]) -> None:
    kept = {"TMPDIR": str(in_tmp)}
    secret = "it's $HOME; a `secret`"
    settings = ("strategy=ddp", "run.progress=off", "run.name=over-ssh")
    done = launch(hosts, "--", "train", *settings, DTRAIN_TRAINING__EPOCHS="1", DTRAIN_RUN__ROOT=secret, **kept)
    assert done.returncode == 0, done.stderr
    assert (in_tmp / secret / "over-ssh" / "config.yaml").is_file()

    failing = str(PROGRAMS / "failing.py")
    done = launch(hosts, "--", failing, "raise", "5", "strategy=ddp", "run.progress=off", **kept)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"[{hosts[1].address}] rank 1 of 2 (")
    assert last.endswith("failed: ValueError: bad luck")

    done = launch(hosts, "--remote-python", "/no/such/python", "--", "train", **kept)
    assert done.returncode != 0
    assert "--remote-python" in done.stderr.strip().splitlines()[-1]


@pytest.mark.timeout(150)
def test_remote_ranks_end_with_the_local_launcher(in_tmp: Path, hosts: tuple[Machine, Machine, str]) -> None:
    one, two, ssh = hosts
    words = ["launch", "--hosts", f"{one.address},{two.address}", "--nproc", "1", "--ssh", ssh]
    command = [*one.inside, sys.executable, "-m", "distributed_training", *words, "--", str(PROGRAMS / "sleeping.py")]
    files = [in_tmp / f"rank-{rank}.json" for rank in range(2)]
    with subprocess.Popen(command, env=environment(OMP_NUM_THREADS="1"), stdout=subprocess.DEVNULL) as process:
        end = time.monotonic() + 90
        while not all(file.exists() for file in files):
            assert time.monotonic() < end, "the ranks did not start"
            time.sleep(0.05)
        pids = [json.loads(file.read_text())["pid"] for file in files]
        process.kill()
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end, "the ranks outlived their launcher"
        time.sleep(0.05)


def test_hosts_are_read_with_their_numbers_of_processes() -> None:
    assert read_hosts("a, me@b:4", 2) == [Place("a", 2), Place("me@b", 4)]
    assert read_hosts("a", None) == [Place("a", None)]
    for wrong in ("a,,b", "a:", "a:0", "a:x", "-oProxyCommand=evil"):
        with pytest.raises(DistributedTrainingError, match="HOST:PROCESSES"):
            read_hosts(wrong, 1)


def test_only_variables_of_the_job_are_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "DTRAIN_RUN__NAME", "MY_TOKEN", "OTHER_TOKEN"):
        monkeypatch.setenv(name, "1")

    sent = forwarded(["MY_TOKEN"])

    assert {"NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "DTRAIN_RUN__NAME", "MY_TOKEN"} <= sent.keys()
    assert not {"OTHER_TOKEN", "PATH", "HOME"} & sent.keys()
    with pytest.raises(DistributedTrainingError, match="--env ABSENT"):
        forwarded(["ABSENT"])
