"""What the pages show works: Python blocks run, commands exist and their settings are known, links lead somewhere.

A line `<!-- no-run: reason -->` before a block leaves it out.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from distributed_training.cli.main import app
from distributed_training.config import Config
from distributed_training.config.load import load_config

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?P<before>[^\n]*)\n```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(kind: str) -> list[Block]:
    """All blocks of a kind that are not left out."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            if match["kind"] == kind and not re.match(r"<!-- no-run: .+ -->", match["before"]):
                line = text.count("\n", 0, match.start("text")) + 1
                found.append(Block(page, line, kind, match["text"]))
    return found


def commands() -> list[tuple[Block, list[str]]]:
    """Every `dtrain` command of the console blocks, as words, without comments and leading variables."""
    found = []
    for block in blocks("console"):
        for line in re.findall(r"^\$ (.*)$", block.text, re.MULTILINE):
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words[:1] == ["dtrain"]:
                words, launched = words[1:], words[words.index("--") + 1 :] if "--" in words else []
                found.append((block, words[: len(words) - len(launched) - 1] if launched else words))
                if launched and not launched[0].endswith(".py"):  # what `dtrain launch` runs is a command as well
                    found.append((block, launched))
    return found


# Commands that show an error on purpose.
WRONG = {"training.epoch=3"}


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_block_runs(block: Block, in_tmp: Path) -> None:
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")

    exec(code, {"__name__": "example"})


@pytest.mark.parametrize(("block", "words"), commands(), ids=lambda value: str(value))
def test_command_exists_and_its_settings_are_known(block: Block, words: list[str]) -> None:
    command = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]  # type: ignore[attr-defined]
    assert not getattr(command, "commands", {}), f"no such command: {words}"
    options = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= options

    settings = [word for word in words if "=" in word and "://" not in word and word not in WRONG]
    load_config(None, settings, environ={}, dotenv="no .env")


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_yaml_block_is_a_config(block: Block, in_tmp: Path) -> None:
    Path("config.yaml").write_text(block.text)

    assert Config.from_file("config.yaml").get("training.epochs")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if heading:
            assert heading in _anchors(file), target


def _anchors(page: Path) -> set[str]:
    """The anchors that headings of a page get."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_have_python_blocks() -> None:
    assert len(blocks("python")) >= 10
    assert len(commands()) >= 20
