"""`tune` takes objects, and refuses what no task can be made of before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

import autoprec
from autoprec import api
from autoprec.errors import UsageError


def test_objects_that_are_nothing_to_tune_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"a tuple of \(int, str\) given, expected \(model, opt"):
        autoprec.tune((1, "loader"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("function", [api.plan, api.answer_quickly])
def test_only_tune_takes_objects(function: object) -> None:
    with pytest.raises(UsageError, match="a tuple given, expected the path of a file here"):
        function((1, 2))  # type: ignore[operator]
