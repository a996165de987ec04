"""The shape of the package: who may import whom, and what importing it costs.

Read from its syntax trees, so that an import inside a function counts too.

A rule is a function from the package's imports to a list of violations, so that each can be tried
on a small synthetic package that breaks it.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import autoprec
from autoprec.backends import registry

PACKAGE = Path(autoprec.__file__).parent

# cli -> api -> reporting | fleet -> tuning -> workers -> backends | hardware -> core -> errors. A
# layer may import itself and what is listed; "" is the package's own __init__, which nothing inside
# may import.
# recipe_for_device chooses the recipe that applying applies; verifying compares a profile with this
# machine; reports makes pages of profiles, tracking logs them; probing finds devices and times
# their products. yaml_files, profiles (profile files, with their comments) and measurement_cache do
# for the layers above what core may not do; version holds one constant. integrations attaches
# profiles to other people's trainers.
FILES = {"measurement_cache", "profile_comments", "profiles", "version", "yaml_files"}
LAYERS = {
    "errors": set(),
    "version": set(),
    "core": {"errors"},
    "yaml_files": {"core", "errors"},
    "measurement_cache": {"yaml_files", "core", "errors"},
    "profile_comments": set(),
    "profiles": {"profile_comments", "yaml_files", "core", "errors"},
    "hardware": {"yaml_files", "core", "errors"},
    "backends": {"core", "errors"},
    "workers": {"backends", "hardware", "core", "errors"},
    "tuning": {"workers", "backends", "hardware", "core", "errors", *FILES},
    "reporting": {"tuning", "core", "version", "errors"},
    "fleet": {
        *("probing", "tuning", "workers", "backends", "hardware", "core", "errors"),
        *FILES,
    },
    "recipe_for_device": {"backends", "hardware", "core", "errors", *FILES},
    "applying": {"recipe_for_device", "backends", "core", "errors", *FILES},
    "integrations": {"applying", "backends", "core", "errors"},
    "reports": {"reporting", "core", "errors", *FILES},
    "tracking": {"reports", "core", "errors", *FILES},
    "verifying": {
        *("recipe_for_device", "probing", "tuning", "workers", "backends", "hardware", "core"),
        *("errors", *FILES),
    },
    "probing": {"workers", "backends", "hardware", "core", "errors", *FILES},
    "api": {
        *("applying", "reports", "tracking", "verifying", "probing", "reporting", "fleet"),
        "tuning",
        *("workers", "backends", "hardware", "core", "errors"),
        *FILES,
    },
    "cli": {"api", "reporting", "fleet", "tuning", "workers", "core", "errors", *FILES},
    "__main__": {"cli"},
    "": {"api", "core", "errors", "version"},
}

# Keras runs on TensorFlow or on torch, so its folder may speak to both.
FRAMEWORK_FOLDERS = {
    "torch": ("backends.torch", "backends.keras"),
    "tensorflow": ("backends.keras",),
    "keras": ("backends.keras",),
}

# A trainer is imported by its own file only, and torch by none of them.
TRAINERS = {
    "lightning": "integrations.lightning.of_lightning",
    "pytorch_lightning": "integrations.lightning.of_pytorch_lightning",
    "lightning_fabric": "integrations.lightning.of_pytorch_lightning",
    **dict.fromkeys(("accelerate", "transformers", "trl", "timm", "deepspeed"), ""),
}

# core decides and never looks: no files, clock, environment, processes or hidden randomness.
LOOKING = {
    *("glob", "io", "logging", "multiprocessing", "os", "pathlib", "platform", "secrets", "shutil"),
    *("signal", "socket", "subprocess", "tempfile", "threading", "time", "urllib", "uuid"),
}

PUBLIC_NAMES = {
    *("apply_profile", "distribute", "load_profile", "log_to", "probe", "report", "tune", "verify"),
    *("AutoprecError", "Policy", "Profile", "Recipe", "__version__"),
}


@dataclass(frozen=True)
class Import:
    """One import: the importing module and the imported one, by full name.

    What is imported `for_types` alone is not imported when the program runs.
    """

    importer: str
    imported: str
    line: int
    for_types: bool = False

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules_of(root: Path) -> dict[str, Path]:
    """Return every module of the package at `root`, by full name."""
    names = {}
    for path in sorted(root.rglob("*.py")):
        parts = (root.name, *path.relative_to(root).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


@cache
def imports_of(root: Path) -> list[Import]:
    """Return every import in the package, those inside functions included."""
    modules = modules_of(root)
    return [
        Import(name, imported, node.lineno, node in for_types)
        for name, path in modules.items()
        for tree in [ast.parse(path.read_text(encoding="utf-8"))]
        for for_types in [set(_nodes_for_types(tree))]
        for imported, node in _imports(name, path, tree, modules)
    ]


def _nodes_for_types(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from (inner for line in node.body for inner in ast.walk(line))


def _imports(
    name: str, path: Path, tree: ast.AST, modules: dict[str, Path]
) -> Iterator[tuple[str, ast.stmt]]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - max(node.level - 1, 0)]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            for alias in node.names:  # `from package import module` imports the module
                full = f"{base}.{alias.name}"
                yield (full if full in modules else base), node


def top(imported: str) -> str:
    return imported.partition(".")[0]


def inside(imported: str) -> str:
    """Return a module's name without the package's: "autoprec.core.recipe" is "core.recipe"."""
    return imported.partition(".")[2]


def own(found: list[Import]) -> list[Import]:
    """Return the imports of the package's own modules."""
    return [each for each in found if top(each.imported) == top(each.importer)]


def layer_violations(found: list[Import]) -> list[str]:
    violations = []
    for each in own(found):
        importer, imported = top(inside(each.importer)), top(inside(each.imported))
        if importer not in LAYERS or imported not in LAYERS:
            violations.append(f"{each}: give the new module a layer")
        elif importer != imported and imported not in LAYERS[importer]:
            violations.append(str(each))
    return violations


def framework_violations(found: list[Import]) -> list[str]:
    return [
        str(each)
        for each in found
        for folder in [FRAMEWORK_FOLDERS.get(top(each.imported))]
        if folder and not f"{inside(each.importer)}.".startswith(tuple(f"{f}." for f in folder))
    ]


def trainer_violations(found: list[Import]) -> list[str]:
    return [
        str(each)
        for each in found
        if top(each.imported) in TRAINERS and inside(each.importer) != TRAINERS[top(each.imported)]
    ]


def core_violations(found: list[Import]) -> list[str]:
    allowed = set(sys.stdlib_module_names) - LOOKING
    return [
        str(each)
        for each in found
        if top(inside(each.importer)) == "core"
        and top(each.imported) not in allowed | {top(each.importer)}
    ]


def backend_violations(found: list[Import]) -> list[str]:
    """Return imports of one framework's folder by another's: what they share lies above both."""

    def folder(module: str) -> str:
        parts = inside(module).split(".")
        return parts[1] if parts[0] == "backends" and len(parts) > 1 else ""

    frameworks = set(registry.BUILT_IN)
    return [
        str(each)
        for each in own(found)
        if {folder(each.importer), folder(each.imported)} <= frameworks
        and folder(each.importer) != folder(each.imported)
    ]


def cycle_violations(found: list[Import]) -> list[str]:
    graph: dict[str, set[str]] = {}
    for each in own(found):
        if each.importer != each.imported:
            graph.setdefault(each.importer, set()).add(each.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


Rule = Callable[[list[Import]], list[str]]
RULES: list[Rule] = [
    *(layer_violations, framework_violations, trainer_violations),
    *(core_violations, backend_violations, cycle_violations),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    assert rule(imports_of(PACKAGE)) == []


# -- each rule can fail ---------------------------------------------------------------------------

BREAKS = [
    (layer_violations, {"core/device/policies.py": "from autoprec.tuning import study"}),
    (layer_violations, {"backends/protocol.py": "import autoprec.hardware.observe"}),
    (layer_violations, {"hardware/observe.py": "from ..backends import base"}),
    (layer_violations, {"core/device/policies.py": "from autoprec import api"}),
    (layer_violations, {"core/device/policies.py": "from autoprec import Policy"}),
    (layer_violations, {"tuning/study.py": "def show():\n    from autoprec import reporting"}),
    (layer_violations, {"cli/tune.py": "from autoprec.backends import base"}),
    (layer_violations, {"helpers.py": "from autoprec import errors"}),
    (framework_violations, {"tuning/study.py": "def run():\n    import torch.nn"}),
    (framework_violations, {"backends/protocol.py": "from keras import Model"}),
    (framework_violations, {"backends/torch/measure/session.py": "import tensorflow as tf"}),
    (framework_violations, {"backends/torchlike.py": "import torch"}),
    (framework_violations, {"integrations/accelerate.py": "def bind():\n    import torch"}),
    (trainer_violations, {"api.py": "import lightning"}),
    (trainer_violations, {"integrations/accelerate.py": "from accelerate import Accelerator"}),
    (trainer_violations, {"integrations/lightning/__init__.py": "import pytorch_lightning"}),
    (core_violations, {"core/device/policies.py": "import numpy as np"}),
    (core_violations, {"core/device/policies.py": "from time import perf_counter"}),
    (core_violations, {"core/device/policies.py": "import os.path"}),
    (
        backend_violations,
        {"backends/keras/measure/session.py": "from autoprec.backends.torch import apply"},
    ),
    (cycle_violations, {"core/a.py": "from . import b", "core/b.py": "import autoprec.core.a"}),
    (
        cycle_violations,
        {"core/a.py": "def f():\n    from .b import x", "core/b.py": "from .a import y"},
    ),
]

KEEPS = {
    "__init__.py": "from autoprec.api import tune",
    "api.py": "from autoprec.tuning import study\nfrom autoprec.hardware import observe",
    "backends/protocol.py": "from autoprec.core import rules",
    "backends/torch/measure/session.py": "import torch\nfrom ..base import Session",
    "backends/keras/measure/session.py": "import keras, tensorflow, torch\nfrom .. import base",
    "cli/tune.py": "def run():\n    from autoprec.api import tune",
    "core/device/policies.py": "import math\nfrom autoprec.errors import AutoprecError",
    "errors.py": "",
    "hardware/observe.py": "import os, pynvml\nfrom autoprec.core import rules",
    "tuning/study.py": "import optuna\nfrom autoprec.backends import base",
}


def package_at(root: Path, files: dict[str, str]) -> Path:
    """Write a package named autoprec whose folders all have an __init__; return its place."""
    package = root / "autoprec"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for folder in [package, *(path for path in package.rglob("*") if path.is_dir())]:
        (folder / "__init__.py").touch()
    return package


@pytest.mark.parametrize(("rule", "broken"), BREAKS)
def test_the_rule_sees_a_break(rule: Rule, broken: dict[str, str], tmp_path: Path) -> None:
    assert rule(imports_of(package_at(tmp_path, {**KEEPS, **broken})))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_accepts_what_is_allowed(rule: Rule, tmp_path: Path) -> None:
    assert rule(imports_of(package_at(tmp_path, KEEPS))) == []


# -- what importing costs -------------------------------------------------------------------------

ALLOWED_BY_IMPORT: set[str] = set()  # third-party packages that `import autoprec` may load
HEAVY = {"torch", "tensorflow", "keras", "optuna", "numpy", "rich", "yaml"}

_REPORT = """
import json, sys
before = set(sys.modules)
{statement}
print(json.dumps(sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})))
"""


def third_party_loaded_by(statement: str) -> set[str]:
    """Return the top-level packages, ours and the standard library's apart, a statement loads."""
    child = subprocess.run(
        [sys.executable, "-c", _REPORT.format(statement=statement)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return set(json.loads(child.stdout)) - sys.stdlib_module_names - {"autoprec"}


INTEGRATIONS = sorted(
    f"autoprec.{inside(name)}"
    for name in modules_of(PACKAGE)
    if inside(name).startswith("integrations") and inside(name) not in TRAINERS.values()
)


@pytest.mark.parametrize("module", INTEGRATIONS)
def test_importing_an_integration_loads_no_trainer_and_no_framework(module: str) -> None:
    loaded = third_party_loaded_by(f"import {module}")
    assert loaded.isdisjoint({*TRAINERS, *FRAMEWORK_FOLDERS})


def test_the_files_of_integrations_are_short() -> None:
    paths = list((PACKAGE / "integrations").rglob("*.py"))
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert len(paths) > 8
    assert {name: lines for name, lines in lengths.items() if lines > 150} == {}


@pytest.mark.parametrize("module", ["autoprec", "autoprec.errors", "autoprec.cli"])
def test_importing_loads_nothing_outside_the_allow_list(module: str) -> None:
    assert third_party_loaded_by(f"import {module}") <= ALLOWED_BY_IMPORT


def test_building_the_command_line_loads_nothing_heavy() -> None:
    statement = "from autoprec.cli import build_parser; build_parser().format_help()"
    assert third_party_loaded_by(statement).isdisjoint(HEAVY)


def test_the_light_import_test_sees_a_heavy_import() -> None:
    assert "yaml" in third_party_loaded_by("import autoprec; import yaml")


# -- what is public -------------------------------------------------------------------------------


def test_all_names_are_the_public_ones() -> None:
    assert set(autoprec.__all__) == PUBLIC_NAMES
    assert len(autoprec.__all__) == len(PUBLIC_NAMES)


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_a_public_name_resolves_and_is_listed(name: str) -> None:
    assert getattr(autoprec, name) is not None
    assert name in dir(autoprec)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        autoprec.no_such_name
