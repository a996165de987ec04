"""The folders of a layer import each other one way, too: none imports a folder that imports it."""

from __future__ import annotations

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
