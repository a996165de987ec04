"""Folders import each other one way, at every level: none imports a folder that imports it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.test_architecture import (
    PACKAGE,
    Import,
    cycle_violations,
    imports_of,
    inside,
    own,
    package_at,
    top,
)

LAYERS = ("cli", "core", "fleet", "hardware", "integrations", "reporting", "tuning", "workers")


def folder_violations(found: list[Import], layer: str) -> list[str]:
    """Return a cycle of folders within a layer."""
    folders = {each.importer.rpartition(".")[0] for each in found}

    def folder(module: str) -> str:
        return module if module in folders else module.rpartition(".")[0]

    return cycle_violations(
        [
            replace(each, importer=folder(each.importer), imported=folder(each.imported))
            for each in own(found)
            if top(inside(each.importer)) == top(inside(each.imported)) == layer
        ]
    )


def level_violations(found: list[Import]) -> list[str]:
    """Return the cycles among what lies in one folder: its files, and each folder in it as a whole.

    Every folder of the package is looked at by itself, so at all levels.
    """
    running = [each for each in own(found) if not each.for_types]
    folders = {
        each.importer[:end]
        for each in running
        for end in (dot.start() for dot in re.finditer(r"\.", each.importer))
    }
    cycles = []
    for folder in sorted(folders):
        below = [
            replace(each, importer=f"it.{importer}", imported=f"it.{imported}")
            for each in running
            if all(m.startswith(f"{folder}.") for m in (each.importer, each.imported))
            for importer, imported in [
                (top(m[len(folder) + 1 :]) for m in (each.importer, each.imported))
            ]
        ]
        cycles += [f"in {folder}: {cycle}" for cycle in cycle_violations(below)]
    return cycles


def test_what_lies_in_a_folder_imports_each_other_one_way() -> None:
    assert level_violations(imports_of(PACKAGE)) == []


@pytest.mark.parametrize("folder", ["core", "backends/torch/apply"])
def test_the_rule_sees_a_cycle_at_any_level(folder: str, tmp_path: Path) -> None:
    at = f"autoprec.{folder.replace('/', '.')}"
    files = {
        f"{folder}/a/x.py": f"from {at}.b import x",
        f"{folder}/a/y.py": "",
        f"{folder}/b/x.py": "",
        f"{folder}/b/y.py": f"from {at}.a import y",
    }
    assert level_violations(imports_of(package_at(tmp_path, files)))
    files[f"{folder}/b/y.py"] = f"if TYPE_CHECKING:\n    from {at}.a import y"
    assert level_violations(imports_of(package_at(tmp_path / "types", files))) == []


@pytest.mark.parametrize("layer", LAYERS)
def test_folders_import_each_other_one_way(layer: str) -> None:
    assert folder_violations(imports_of(PACKAGE), layer) == []


def test_the_rule_sees_a_cycle_of_folders(tmp_path: Path) -> None:
    files = {
        "hardware/machine.py": "",
        "hardware/names.py": "from autoprec.hardware.probes import pci",
        "hardware/probes/cpu.py": "from autoprec.hardware import machine",
        "hardware/probes/pci.py": "",
    }
    assert folder_violations(imports_of(package_at(tmp_path, files)), "hardware")
    del files["hardware/names.py"]
    assert folder_violations(imports_of(package_at(tmp_path / "kept", files)), "hardware") == []


def test_the_rule_sees_a_file_of_a_layer_that_is_above_and_one_that_is_below(
    tmp_path: Path,
) -> None:
    files = {
        "core/recipe.py": "",
        "core/profile.py": "from autoprec.core.speed import space",
        "core/speed/space.py": "from autoprec.core import recipe",
    }
    assert folder_violations(imports_of(package_at(tmp_path, files)), "core")
    files["core/profile/__init__.py"] = files.pop("core/profile.py")
    files["core/profile/fit.py"] = "from autoprec.core import profile"
    assert folder_violations(imports_of(package_at(tmp_path / "moved", files)), "core") == []
