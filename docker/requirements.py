"""Print what the package and some of its extras need, one requirement a line.

requirements.py PYPROJECT EXTRA[,EXTRA...]

So that an image can install the libraries before, and apart from, the package itself.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The requirements of the project at `pyproject`, with those of these extras."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    known = project["optional-dependencies"]
    unknown = [extra for extra in extras if extra not in known]
    if unknown:
        raise SystemExit(f"no such extra: {', '.join(unknown)}; there are {', '.join(known)}")
    return [*project["dependencies"], *(line for extra in extras for line in known[extra])]


if __name__ == "__main__":
    _, path, names = sys.argv
    sys.stdout.write("\n".join(requirements(Path(path), [name for name in names.split(",") if name])) + "\n")
