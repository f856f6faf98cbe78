"""The documentation site has every page and every public name. That it builds without a warning is for `make docs`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts import site_pages
from tests.pages import ROOT

import distributed_training


def nav(node: Any) -> list[str]:
    """All pages that a part of the navigation leads to."""
    if isinstance(node, str):
        return [node]
    return [page for each in (node.values() if isinstance(node, dict) else node) for page in nav(each)]


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    return found


def test_navigation_has_every_page(settings: dict[str, Any]) -> None:
    written = [path.name for path in (ROOT / "docs").glob("*.md")]
    made = [f"reference/{name}.md" for name in (*site_pages.REFERENCE, "index", "commands")]

    assert sorted(nav(settings["nav"])) == sorted([*written, *made, *site_pages.MOVED.values()])


def test_front_page_links_to_every_page() -> None:
    front = (ROOT / "docs" / "index.md").read_text()

    assert [p.name for p in (ROOT / "docs").glob("*.md") if p.name != "index.md" and f"({p.name})" not in front] == []


def test_nothing_is_fetched_to_read_it(settings: dict[str, Any]) -> None:
    assert settings["theme"]["font"] is False
    assert settings["use_directory_urls"] is False


def test_every_public_name_has_a_place_in_the_reference() -> None:
    page = site_pages._names()

    assert [
        name for name in distributed_training.__all__ if not name.startswith("_") and f"[`{name}`]" not in page
    ] == []
    for name, modules in site_pages.REFERENCE.items():
        shown = site_pages._reference(name, modules)
        assert re.search(r"^::: distributed_training\.", shown, re.MULTILINE), name


def test_every_command_is_in_the_reference() -> None:
    page = site_pages._commands()

    for name in ("dtrain train", "dtrain serve", "dtrain config explain", "dtrain bench all", "dtrain plan"):
        assert f"\n## {name}\n" in page
    assert "| `--resume` |" in page


def test_links_to_other_files_lead_to_their_pages() -> None:
    text = "[a](../examples/train_mpi.py) [b](strategies.md#x) [c](../CHANGELOG.md) [d](https://e.org/x.py)\n```text\n[e](../examples)\n```\n"

    assert site_pages._relinked(text, ROOT / "docs" / "mpi.md", "mpi.md") == (
        "[a](source/examples/train_mpi.py.md) [b](strategies.md#x) [c](changes.md) [d](https://e.org/x.py)\n"
        "```text\n[e](../examples)\n```\n"
    )
    (uri, page), *others = site_pages._source(ROOT / "examples")
    assert uri == "source/examples/index.md"
    assert "[`train_mpi.py`](train_mpi.py.md): A training loop of your own" in page
    assert dict(others)["source/examples/train_mpi.py.md"].count("````") == 2
    assert len(others) == len([p for p in Path(ROOT / "examples").iterdir() if p.suffix in site_pages.LANGUAGES])
