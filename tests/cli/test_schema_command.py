"""`autoprec schema`: printed, or written whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoprec.cli import main
from autoprec.core.profile.schema import profile_schema


def test_it_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == profile_schema()


def test_it_is_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "autoprec.schema.json"
    assert main(["schema", "-o", str(file)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(file.read_text()) == profile_schema()


def test_the_file_that_is_shipped_is_todays() -> None:
    """Write it again by `autoprec schema -o profiles/profile.schema.json`."""
    file = Path(__file__).parents[2] / "profiles" / "profile.schema.json"
    assert json.loads(file.read_text()) == profile_schema()


@pytest.mark.parametrize("name", ["schema.yaml", "gone/schema.json"])
def test_another_place_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schema", "-o", str(tmp_path / name)]) == 2
    assert "expected FILE.json in a folder that exists" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
