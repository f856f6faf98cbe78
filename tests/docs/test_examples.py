"""What the pages show works: Python blocks run, settings are known, links lead somewhere. tests/pages.py has the marks.

Commands are checked by test_commands.py. Blocks that need another process are run by the files that their marks name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.pages import PAGES, ROOT, Block, blocks, run_by

from distributed_training.config import Config

KINDS = {"python", "console", "bash", "yaml", "json", "text"}
"""The kinds of blocks that these tests know what to do with."""


@pytest.mark.parametrize("block", [block for block in blocks("python") if not block.mark], ids=str)
def test_python_block_runs(block: Block, in_tmp: Path) -> None:
    code = compile("\n" * (block.line - 1) + block.text, str(block.page), "exec")

    exec(code, {"__name__": "example"})


@pytest.mark.parametrize("block", [block for block in blocks("python") if block.mark], ids=str)
def test_python_block_that_is_not_run_as_it_is_can_be_read(block: Block) -> None:
    """A cell of a notebook may hold lines for the notebook itself."""
    compile(re.sub(r"^[%!].*$", "", block.text, flags=re.MULTILINE), str(block.page), "exec")


@pytest.mark.parametrize("block", [block for block in blocks("yaml") if not block.mark], ids=str)
def test_yaml_block_is_a_config(block: Block, in_tmp: Path) -> None:
    Path("config.yaml").write_text(block.text)

    assert Config.from_file("config.yaml").get("training.epochs")


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_block_can_be_read(block: Block) -> None:
    assert json.loads(block.text)


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert [(str(block), block.kind) for block in blocks() if block.kind not in KINDS] == []


def test_every_block_that_another_file_runs_is_run_there() -> None:
    files = {block.why for block in blocks() if block.mark == "run-by"}

    assert files
    for file in files:
        path = ROOT / file
        assert path.is_file(), file
        source, pages = path.read_text(), {block.page.name for block in run_by(str(path))}
        assert "run_by(__file__" in source, f"{file} does not look for its blocks"
        assert [page for page in pages if f'"{page}"' not in source] == []


def test_what_is_never_run_says_why() -> None:
    """Only what needs the internet, an account, a cloud or hardware that a test has not got."""
    reasons = {str(block): block.why for block in blocks() if block.mark == "no-run"}

    assert len(reasons) <= 1
    assert [where for where, why in reasons.items() if len(why.split()) < 3] == []


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
    assert len([block for block in blocks("python") if not block.mark]) >= 10
