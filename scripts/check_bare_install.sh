#!/usr/bin/env bash
# Prove that the package without any extra imports, trains and resumes: scripts/check_bare_install.sh [PYTHON]
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${1:-python3}" -m venv "$folder/venv"
pip() { "$folder/venv/bin/python" -m pip --quiet --disable-pip-version-check "$@" 2> >(grep -v 'is ignored: it is neither' >&2); }
pip install --no-compile -c constraints.txt torch
pip install --no-compile -c constraints.txt .
dtrain="$folder/venv/bin/dtrain"
cd "$folder"
"$dtrain" train --split training.epochs=3 run.name=bare
"$dtrain" train --resume auto training.epochs=5 run.name=bare
"$dtrain" validate runs/bare
"$dtrain" predict runs/bare --output predictions.csv
"$folder/venv/bin/python" - <<'PY'
import importlib.util, json, pathlib

for extra in ("matplotlib", "tensorboard", "wandb", "pyarrow", "PIL", "sklearn"):
    assert importlib.util.find_spec(extra) is None, f"{extra} came along with the bare install"
events = [json.loads(line) for line in pathlib.Path("runs/bare/events.jsonl").open()]
resumed = [event["resumed_from"] for event in events if event["event"] == "start"]
assert resumed[0] is None and resumed[1] > 0, resumed
assert len(pathlib.Path("predictions.csv").read_text().splitlines()) > 300
print("bare install: imports, trains, resumes, validates and predicts")
PY
