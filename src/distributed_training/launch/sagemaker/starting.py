"""The first script in the container: unpacks the source, installs what the image lacks, and becomes our Python.

The job names it as the container's entry point, in place of SageMaker's toolkit: the toolkit does not pass SIGTERM on,
so that a training could not save before a spot machine is taken away. By `exec`, ours is the process that gets it.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence

from distributed_training.config.sagemaker_container import SOURCE_CHANNEL

FOLDER = ".dtrain"
"""Folder of ours in the packed source."""
ARCHIVE = "source.tar.gz"
ENTRYPOINT = ["/bin/bash", "-c"]
_UNPACK = f"mkdir -p /opt/ml/code && cd /opt/ml/code && tar xzf /opt/ml/input/data/{SOURCE_CHANNEL}/{ARCHIVE}"
ARGUMENTS = [f"{_UNPACK} && exec bash {FOLDER}/start.sh"]
# What the package needs beside torch and numpy, which the image has: for an install without metadata.
_NEEDS = ("omegaconf>=2.3", "msgpack>=1.0.5", "typer>=0.15", "rich>=13", "torchmetrics>=1.4", "safetensors>=0.4.3")
_OF_THE_IMAGE = ("torch", "numpy")

START = """#!/bin/bash
# Written by dtrain launch --sagemaker. Runs in /opt/ml/code, where the source was unpacked.
base="${SAGEMAKER_BASE_DIR:-/opt/ml}"
python=""

give_up() {
    mkdir -p "$base/output"
    printf '%s' "$1" > "$base/output/failure"
    echo "$1" >&2
    exit 1
}

# The system may have a Python of its own: the one with torch is meant. Never another torch than the image's: it is the
# one that fits its CUDA, NCCL and EFA.
torch='import importlib.metadata as m, sys; print("torch==" + m.version("torch")); sys.exit(sys.version_info < (3, 11))'
for name in python python3; do
    if [ -z "$python" ] && "$name" -c "$torch" > FOLDER/constraints.txt 2> /dev/null; then
        python="$(command -v "$name")"
    fi
done
[ -n "$python" ] || give_up "the image needs Python 3.11 or newer with torch; choose another with --image"

install() {
    "$python" -m pip install --quiet --disable-pip-version-check --root-user-action ignore --retries 5 --timeout 60 \\
        -c FOLDER/constraints.txt -r "$1" &
    installing=$!
    trap 'kill "$installing"; exit 143' TERM
    wait "$installing" || give_up "pip could not install $1: the log says why. Without a way to a package index (a VPC \
without one, isolate=true) the image must hold the packages"
    trap - TERM
}

install FOLDER/requirements.txt
if [ -f requirements.txt ]; then install requirements.txt; fi
export PYTHONPATH="$PWD/FOLDER:$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m distributed_training.launch.sagemaker.entry
""".replace("FOLDER", FOLDER)


def requirements(extras: Sequence[str]) -> str:
    """The requirements of this package and of some of its extras, without what the image has."""
    try:
        listed = importlib.metadata.requires("distributed-training") or []
    except importlib.metadata.PackageNotFoundError:  # run from its source
        listed = list(_NEEDS)
    wanted = []
    for line in listed:
        need, _, marker = (part.strip() for part in line.partition(";"))
        extra = re.search(r"""extra\s*==\s*['"]([\w-]+)['"]""", marker)
        name = re.split(r"[\s\[<>=!~]", need, maxsplit=1)[0].lower()
        if name not in _OF_THE_IMAGE and (extra is None or extra[1] in extras):
            wanted.append(need)
    return "".join(f"{need}\n" for need in dict.fromkeys(wanted))


def known_extras() -> list[str]:
    """The extras that this package has; none where it runs from its source."""
    try:
        return importlib.metadata.metadata("distributed-training").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return []
