"""The launch agent of mpirun for tests: `HOST COMMAND...` runs in the network namespace called like the host, which is
also the host's name there. `--here HOST COMMAND...`: the same, for the machine on which mpirun itself is started."""

from __future__ import annotations

import os
import shlex
import sys

words = sys.argv[1:]
here = words[:1] == ["--here"]
while words[0].startswith("-"):
    words = words[1:]
host, command = words[0], shlex.join(words[1:]) if here else " ".join(words[1:])
inside = f"hostname {host} && {command}" if not here else f"hostname {host} && exec {command}"
os.execvp("ip", ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", inside])
