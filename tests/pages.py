"""The pages of the documentation as tests see them: their blocks of code, and the commands in those.

A line before a block says what becomes of it, where that is not to be run as it is:

    <!-- no-run: reason -->         it cannot run in a test; what it names is checked all the same
    <!-- run-by: tests/... -->      that file of tests runs it, with addresses, files or sizes of its own
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?P<before>[^\n]*)\n *```(?P<kind>\w*)[^\n]*\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- (?P<mark>no-run|run-by): (?P<why>.+) -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    kind: str
    text: str
    mark: str = ""
    """`no-run`, `run-by` or nothing."""
    why: str = ""
    """The reason of a `no-run`, the file of a `run-by`."""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A line of a shell on a page, without comments and leading variables."""

    block: Block
    words: tuple[str, ...]
    variables: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.block} {' '.join(self.words)}"


def blocks(*kinds: str) -> list[Block]:
    """All blocks of some kinds, or of all of them, in the order of the pages."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if not kinds or match["kind"] in kinds:
                line = text.count("\n", 0, match.start("text")) + 1
                mark = MARK.match(match["before"])
                said = (mark["mark"], mark["why"]) if mark else ("", "")
                found.append(Block(page, line, match["kind"], match["text"], *said))
    return found


def run_by(file: str, page: str | None = None) -> list[Block]:
    """The blocks that a file of tests runs, of one page or of all of them."""
    path = Path(file).relative_to(ROOT).as_posix()
    return [block for block in blocks() if block.why == path and page in (None, block.page.name)]


def shell_lines() -> list[Command]:
    """Every command of the blocks of a shell: after `$` in a console, all lines of bash."""
    found = []
    for block in blocks("console", "bash"):
        text = block.text.replace("\\\n", " ")
        for line in re.findall(r"^\$ (.*)$", text, re.MULTILINE) if block.kind == "console" else text.splitlines():
            words = shlex.split(line, comments=True)
            variables = []
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                variables.append(words.pop(0))
            if words:
                found.append(Command(block, tuple(words), tuple(variables)))
    return found


def dtrain_commands() -> list[Command]:
    """What `dtrain` is given on the pages, itself or through a launcher; `dtrain launch A -- B` are two commands."""
    found = []
    for command in shell_lines():
        words = command.words
        for program in (("dtrain",), ("-m", "distributed_training")):
            start = next((i for i in range(len(words)) if words[i : i + len(program)] == program), None)
            if start is None:
                continue
            ours = words[start + len(program) :]
            first, launched = (ours[: ours.index("--")], ours[ours.index("--") + 1 :]) if "--" in ours else (ours, ())
            found.append(Command(command.block, first, command.variables))
            if launched and not launched[0].endswith(".py"):
                found.append(Command(command.block, launched, command.variables))
    return found
