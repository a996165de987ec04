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

LAYERS = ("cli", "fleet", "hardware", "reporting", "workers")


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


def test_the_folders_of_core_import_each_other_one_way() -> None:
    """Its own files are below them (dtypes, recipe) and above (profile): they are no folder."""
    found = [
        replace(each, importer=each.importer.rpartition(".")[0], imported=_folder(each.imported))
        for each in own(imports_of(PACKAGE))
        if each.importer.startswith("autoprec.core.") and each.imported.startswith("autoprec.core.")
    ]
    between = [e for e in found if "autoprec.core" not in (e.importer, e.imported)]
    assert cycle_violations(between) == []


def _folder(module: str) -> str:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return module if path.is_dir() else module.rpartition(".")[0]
