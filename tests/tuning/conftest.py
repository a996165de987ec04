"""Fixtures that several tests of tuning use."""

from __future__ import annotations

import pytest


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the device's own products untimed: they say nothing of a simulated model."""
    monkeypatch.setattr("autoprec.api._measure_device", lambda facts, frameworks: facts)
