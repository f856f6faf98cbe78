#!/usr/bin/env bash
# Make a virtual environment and install the package with extras: scripts/setup.sh PYTHON VENV EXTRA[,EXTRA...]
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2 extras=$3

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $("$python" --version) found, 3.11 or newer is needed: make PYTHON=python3.12 ..." >&2
    exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet --disable-pip-version-check "$@" 2> >(grep -v 'is ignored: it is neither' >&2); }
wants() { [[ ,$extras, == *,$1,* ]]; }

echo "installing into $venv ..."
# --no-compile: Python compiles what it imports, which is the smaller part.
# torch first and pinned: another package must never choose a different build of it.
pip install --no-compile -c constraints.txt torch
# These two are built against the torch installed here, so pip must not build them in an environment of their own.
if wants deepspeed; then
    pip install --no-compile -c constraints.txt 'setuptools<81' wheel packaging ninja
    DS_BUILD_OPS=0 pip install --no-compile -c constraints.txt --no-build-isolation deepspeed
fi
if wants horovod; then scripts/build_horovod.sh "$venv/bin/python"; fi
pip install --no-compile -c constraints.txt -e ".[$extras]"
