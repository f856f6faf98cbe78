"""How torch's threads wait."""

from __future__ import annotations

import os

import pytest

from distributed_training.runtime.threads import keep_waits_short


def test_spins_are_short_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    keep_waits_short()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
    os.environ.pop("GOMP_SPINCOUNT")
    keep_waits_short()
    assert os.environ["GOMP_SPINCOUNT"] == "1000"


def test_a_waiting_policy_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    keep_waits_short()
    assert "GOMP_SPINCOUNT" not in os.environ
