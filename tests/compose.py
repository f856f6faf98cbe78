"""compose.yaml without Docker: what each service would run, with its variables, as a process of this machine."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
FILE = ROOT / "compose.yaml"
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")


def services(**variables: str) -> dict[str, Any]:
    """The services by name. `${NAME:-default}` is that of `variables`, or else the default."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match["name"], match["default"] or "")

    # Compose substitutes in values after it has read the YAML; with values as plain as ours, before is the same.
    found: dict[str, Any] = yaml.safe_load(VARIABLE.sub(value, FILE.read_text(encoding="utf-8")))["services"]
    return found


def stages() -> dict[str, str]:
    """The stages of the Dockerfile: name -> its lines, with those that a backslash continues as one."""
    text = re.sub(r"\\\n\s*(#.*\n\s*)*", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    parts = re.split(r"^FROM .* AS (\S+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def entry_point(service: dict[str, Any]) -> list[str]:
    """The program of a service: its own, or that of its image."""
    if "entrypoint" in service:
        return list(service["entrypoint"])
    match = re.search(r"^ENTRYPOINT (\[.*\])$", stages()[service["build"]["target"]], re.MULTILINE)
    assert match, f"{service['build']['target']}: no entry point"
    return list(yaml.safe_load(match[1]))


def command(service: dict[str, Any]) -> list[str]:
    """What a service runs, here: programs are those beside this Python."""
    program, *words = [*entry_point(service), *service["command"]]
    return [str(Path(sys.executable).parent / program), *words]


def health_command(service: dict[str, Any]) -> list[str]:
    """What asks whether a service is healthy, here."""
    kind, program, path, *words = service["healthcheck"]["test"]
    assert (kind, program, path) == ("CMD", "python", "/opt/health.py")
    return [sys.executable, str(ROOT / "docker" / "health.py"), *words]
