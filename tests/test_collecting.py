"""Which files a run imports: those of which its `-m` can select a test, and no other."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import pytest_collection_modifyitems, pytest_ignore_collect

TORCH = "import torch\n"
ZOO = "import pytest\npytestmark = pytest.mark.zoo\n"
EVERY_DAY = "not gpu and not zoo"


@pytest.mark.parametrize(
    ("text", "expression", "imported"),
    [
        ("", "", True),
        (TORCH, "", True),
        ("", f"not torch and not keras and {EVERY_DAY}", True),
        (TORCH, f"not torch and not keras and {EVERY_DAY}", False),
        ("", f"torch and {EVERY_DAY}", False),
        (TORCH, f"torch and {EVERY_DAY}", True),
        (TORCH, "keras", False),
        (TORCH, "torch and zoo", False),
        (TORCH + ZOO, "torch and zoo", True),
        (TORCH + ZOO, f"torch and {EVERY_DAY}", True),  # another of its tests may have no mark
        (ZOO, "zoo and keras", False),
        (ZOO + "@pytest.mark.keras\n", "zoo and keras", True),
    ],
)
def test_a_file_is_imported_where_one_of_its_tests_can_be_selected(
    text: str, expression: str, imported: bool, tmp_path: Path
) -> None:
    path = tmp_path / "test_file.py"
    path.write_text(text, encoding="utf-8")
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    assert (pytest_ignore_collect(path, config) is None) == imported


@pytest.mark.parametrize("expression", ["torch and zoo", "keras and zoo", "not torch and zoo"])
def test_a_folder_is_left_out_by_its_name_alone(expression: str) -> None:
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    folder = Path(__file__).parent
    assert pytest_ignore_collect(folder / "tuning", config) is None
    ignored = pytest_ignore_collect(folder / "backends" / "torch", config)
    assert (ignored is None) == (expression == "torch and zoo")


@pytest.mark.parametrize("text", ["from elsewhere import zoo\n", ZOO])
def test_a_mark_that_a_file_takes_from_another_is_an_error(text: str, tmp_path: Path) -> None:
    path = tmp_path / "test_file.py"
    path.write_text(text, encoding="utf-8")
    marks = {"zoo": pytest.mark.zoo}
    item: Any = SimpleNamespace(
        path=path, nodeid="test_file.py::test", get_closest_marker=marks.get
    )
    if text == ZOO:
        pytest_collection_modifyitems([item])
    else:
        with pytest.raises(pytest.UsageError, match=r"Write pytest\.mark\.zoo there"):
            pytest_collection_modifyitems([item])


def test_what_takes_minutes_starts_first_and_files_with_slow_tests_before_others(
    tmp_path: Path,
) -> None:
    """So do the other tests of a file whose slow ones are left out, as `make test` does."""
    written = {"quick": (), "slow": ("slow",), "gate": ("slow", "zoo"), "zoo": ("zoo",)}
    items: list[Any] = []
    for name, marks in {**written, "beside": ("slow",)}.items():
        path = tmp_path / f"test_{name}.py"
        path.write_text("".join(f"pytest.mark.{mark}\n" for mark in marks), encoding="utf-8")
        closest = {mark: mark for mark in written.get(name, ())}.get
        items += [SimpleNamespace(path=path, nodeid=name, get_closest_marker=closest)]
    pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["gate", "slow", "beside", "zoo", "quick"]


@pytest.mark.parametrize(
    "name",
    [
        *("accelerate", "cloudpickle", "lightning", "nbclient", "nbformat", "peft"),
        *("pytorch_lightning", "transformers"),
    ],
)
def test_what_tests_are_skipped_without_is_installed_with_the_dev_extra(name: str) -> None:
    assert importlib.util.find_spec(name) is not None, "pip install -e '.[dev]'"
