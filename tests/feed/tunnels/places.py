"""What tunnels of tests are made of: stand-ins for programs that need the internet, and an sshd of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from tests.launching import free_port, need

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")


def stand_in(folder: Path, name: str) -> str:
    """A program of this name in a folder: `cloudflared` or `ngrok`."""
    source = (Path(__file__).parent / "stand_in.py").read_text(encoding="utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!{sys.executable} -ES\n{source}", encoding="utf-8")
    program.chmod(0o755)
    return str(program)


@contextmanager
def ssh_server(folder: Path) -> Iterator[tuple[str, str]]:
    """An sshd on this machine that knows one key: (destination, ssh command)."""
    need("sshd (Debian package openssh-server)", SSHD is not None)
    need("ssh and ssh-keygen (Debian package openssh-client)", bool(shutil.which("ssh") and shutil.which("ssh-keygen")))
    assert SSHD is not None
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it drops its privileges; a system without the service lacks it
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=30)
    port = free_port()
    settings = [
        f"Port={port}",
        "ListenAddress=127.0.0.1",
        f"HostKey={folder / 'host'}",
        f"AuthorizedKeysFile={folder / 'user.pub'}",
        f"PidFile={folder / 'pid'}",
        "StrictModes=no",
        "PermitRootLogin=yes",
        "PasswordAuthentication=no",
        "UsePAM=no",
    ]
    options = [word for setting in settings for word in ("-o", setting)]
    known = f"-o UserKnownHostsFile={folder / 'known'} -o StrictHostKeyChecking=accept-new"
    ssh = f"ssh -F none -i {folder / 'user'} -o IdentitiesOnly=yes {known}"
    user = psutil.Process().username()
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen([SSHD, "-D", "-e", "-f", os.devnull, *options], stderr=log) as process,
    ):
        try:
            _wait_until_up(folder / "log", process)
            yield f"{user}@127.0.0.1:{port}", ssh
        finally:
            process.terminate()


def _wait_until_up(log: Path, process: subprocess.Popen) -> None:
    end = time.monotonic() + 20
    while "Server listening" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)
