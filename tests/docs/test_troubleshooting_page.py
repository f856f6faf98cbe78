"""Error messages point to sections of the troubleshooting page: each of them is there."""

from __future__ import annotations

import re

import pytest
from tests.launching import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
LINK = re.compile(r"troubleshooting\.md#([a-z0-9-]+)")
SECTIONS = {
    re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
    for title in re.findall(r"^#+ (.*)$", PAGE.read_text(), flags=re.MULTILINE)
}


def sources() -> dict[str, str]:
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    return {str(path.relative_to(ROOT)): path.read_text() for path in files}


def test_every_link_leads_to_a_section() -> None:
    broken = {(name, anchor) for name, text in sources().items() for anchor in LINK.findall(text)} - {
        (name, anchor) for name in sources() for anchor in SECTIONS
    }
    assert not broken


def test_links_inside_the_page_lead_to_sections() -> None:
    assert set(re.findall(r"\]\(#([a-z0-9-]+)\)", PAGE.read_text())) <= SECTIONS


@pytest.mark.parametrize(
    "anchor", ["a-rank-is-gone", "a-rank-hangs-or-never-arrives", "the-master-cannot-be-reached", "ranks-differ"]
)
def test_messages_do_link_there(anchor: str) -> None:
    assert any(anchor in LINK.findall(text) for name, text in sources().items() if name.startswith("src"))


def test_settings_that_are_named_exist() -> None:
    from distributed_training.config import Config

    known = Config().to_dict()
    named = re.findall(r"`(training|data|run|strategy|model|checkpoint)\.(\w+)", PAGE.read_text())
    assert named
    assert [(section, key) for section, key in named if key not in known[section]] == []
