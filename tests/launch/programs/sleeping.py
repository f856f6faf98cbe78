"""Leaves its process id and what it was given in a file, and sleeps."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

facts = {"pid": os.getpid(), "words": sys.argv, "threads": os.environ["OMP_NUM_THREADS"], "home": sys.path[0]}
part = Path(f"rank-{os.environ['RANK']}.part")
part.write_text(json.dumps(facts))
part.rename(part.with_suffix(".json"))
time.sleep(120)
