"""One side of a split in a process of its own: runs the words in WORDS as `dtrain` or as a script, writes to SCREEN."""

from __future__ import annotations

import json
import os
import runpy
import sys

from distributed_training.cli.main import main

sys.modules["matplotlib"] = None  # type: ignore[assignment]  # to draw a report takes seconds
words = json.loads(os.environ.pop("WORDS"))
screen = os.open(os.environ.pop("SCREEN"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(screen, 1)
os.dup2(screen, 2)
os.close(screen)
if words[0].endswith(".py"):
    sys.argv = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))  # as Python does for a script
    runpy.run_path(words[0], run_name="__main__")
else:
    sys.argv = ["dtrain", *words]
    main()
