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

echo "installing into $venv ..."
# torch first and pinned: another package must never choose a different build of it.
pip install -c constraints.txt torch
pip install -c constraints.txt -e ".[$extras]"
