"""The tables of settings in the documentation are those of the schema."""

from __future__ import annotations

from scripts.make_config_docs import PAGE, updated

from distributed_training.config.config import known_keys


def test_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert page == updated(page), "run: python scripts/make_config_docs.py"


def test_every_setting_has_a_row() -> None:
    page = PAGE.read_text(encoding="utf-8")

    assert [key for key in known_keys() if f"| `{key}` |" not in page] == []
