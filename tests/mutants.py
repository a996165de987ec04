"""Mutation testing of `core/`: how many small faults in a module do its own tests find?

mutmut makes the faults and runs the tests; here stand which tests are a module's, and the table.
Every module is mutated in a copy of the package under `build/mutants/`, so that nothing is left
behind where one works. `tests/mutants.md` says which mutants are left alive, and why.

    python tests/mutants.py core/speed/selection.py  # seconds
    python tests/mutants.py                 # every module named below: some minutes

Constants of a module are not mutated, nor what is decorated (properties).
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CORE = Path("autoprec/core")
TREE = ROOT / "build" / "mutants"

#: The test files of a module of `core/`, as the module is named, without `test_`. What several
#: modules decide together is tested where it is decided.
TESTS_OF = {
    "device/policies": ("device/policies", "device/uncertain_timings"),
    "device/dtype_support": ("device/dtype_support", "device/uncertain_timings"),
    "speed/acquisition": (
        *("speed/acquisition", "speed/acquisition_neighbours", "speed/acquisition_gains"),
        *("speed/feasibility", "speed/keep_memory", "speed/stopping", "speed/communication"),
    ),
    "speed/stopping": ("speed/stopping",),
    "speed/feasibility": ("speed/feasibility", "speed/acquisition"),
    "speed/cost_model": ("speed/cost_model",),
    "speed/selection": ("speed/selection", "speed/trial_results"),
    "speed/consistency": ("speed/consistency",),
    "speed/noise": ("speed/noise",),
    "speed/race": ("speed/race",),
    "speed/rounds": ("speed/rounds", "speed/race_rounds"),
    "speed/trial_results": ("speed/trial_results", "speed/acquisition", "speed/feasibility"),
    "numerics/island_proposals": ("numerics/island_proposals",),
    "numerics/judging": (
        "numerics/loss_origin",
        *("numerics/judging", "numerics/judging_longer_runs", "numerics/judging_reports"),
        *("numerics/loss_curves", "numerics/late_failures", "numerics/single_step"),
        *("numerics/small_losses", "numerics/learning", "numerics/buffers"),
    ),
    "numerics/tolerance": (
        *("numerics/tolerance", "numerics/judging", "numerics/loss_curves"),
        *("numerics/late_failures", "numerics/single_step", "numerics/small_losses"),
    ),
    "numerics/headroom": ("numerics/headroom",),
    "numerics/single_step": ("numerics/single_step", "numerics/evaluation", "numerics/judging"),
    "numerics/late_failures": (
        *("numerics/late_failures", "numerics/error_floor", "numerics/judging"),
        "numerics/small_losses",
    ),
    "numerics/loss_origin": ("numerics/loss_origin",),
    "numerics/loss_curves": (
        *("numerics/loss_curves", "numerics/judging", "numerics/small_losses"),
        *("numerics/curve_samples", "numerics/learning"),
    ),
    "numerics/proof_steps": ("numerics/proof_steps",),
    "numerics/watching": ("numerics/watching",),
    "numerics/buffers": ("numerics/buffers",),
    "parallel/effective_batch": ("parallel/effective_batch",),
}

#: How mutmut names a function's versions in the file that holds all of them.
_ORIGINAL = "__mutmut_orig"


@dataclass(frozen=True)
class Result:
    """What came of one module's mutants; `survivors` are the changed lines of each by its name."""

    module: str
    mutants: int
    survivors: dict[str, str]

    @property
    def share(self) -> float:
        """The share that was killed."""
        return 1 - len(self.survivors) / self.mutants if self.mutants else 1.0


def mutate(module: str, children: int) -> Result:
    """Mutate one module of `core/` and run its tests on every mutant."""
    tree = TREE / module
    copy_package(module, tree)
    words = ["-m", "mutmut", "run", "--max-children", str(children)]
    # A path to this checkout would be imported before the mutated copy.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    run = [sys.executable, *words]
    done = subprocess.run(
        run, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"mutmut failed on {module}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    mutated = tree / "mutants" / CORE / f"{module}.py"
    ended = json.loads(mutated.with_suffix(".py.meta").read_text())["exit_code_by_key"]
    alive = [name for name, code in ended.items() if code in (0, 5, 33, None)]
    return Result(module, len(ended), _changes(mutated, alive))


def file_of_tests(name: str) -> str:
    """The path of a test file that `TESTS_OF` names, from the root."""
    folder, _, stem = name.rpartition("/")
    return f"tests/core/{folder}/test_{stem}.py"


def copy_package(module: str, tree: Path) -> None:
    """Copy the package, its core tests and what they read; a pyproject.toml tells mutmut."""
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("autoprec", "tests/core", "profiles", "benchmarks/results"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    own = ("conftest.py", "factories.py", "fork_server.py", "processes.py", "slow_marks.py")
    for name in own:
        shutil.copy(ROOT / "tests" / name, tree / "tests")
    tests = [file_of_tests(name) for name in TESTS_OF[module]]
    arguments = ["-p", "no:cacheprovider", "--hypothesis-profile=mutants"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    _, _, options = project.partition("[tool.pytest.ini_options]")
    (tree / "pyproject.toml").write_text(
        f"""[tool.mutmut]
source_paths = ["autoprec"]
only_mutate = ["{CORE.as_posix()}/{module}.py"]
also_copy = ["profiles", "benchmarks/results"]
pytest_add_cli_args = {json.dumps(arguments)}
pytest_add_cli_args_test_selection = {json.dumps(tests)}
timeout_multiplier = 5.0
use_git_change_detection = false
track_dependencies = false

[tool.pytest.ini_options]{options}""",
        encoding="utf-8",
    )


def _changes(mutated: Path, alive: list[str]) -> dict[str, str]:
    """The changed lines of every mutant named, from the file that holds all of them."""
    tree = ast.parse(mutated.read_text(encoding="utf-8"))
    code = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}

    def lines(name: str) -> list[str]:
        function = code[name]
        function.name = "f"
        return ast.unparse(function).splitlines()

    found = {}
    for mutant in alive:
        name = mutant.rpartition(".")[2]
        original = lines(name.rpartition("__mutmut_")[0] + _ORIGINAL)
        rows = list(difflib.unified_diff(original, lines(name), n=0, lineterm=""))[3:]
        found[name] = "\n".join(f"    {row[0]} {row[1:].strip()}" for row in rows)
    return found


def main() -> None:
    """Print the table, and what survived."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("modules", nargs="*", default=list(TESTS_OF), help="core/FOLDER/NAME.py")
    parser.add_argument("--children", type=int, default=2, help="how many mutants at a time")
    options = parser.parse_args()
    modules = [name.removeprefix("core/").removesuffix(".py") for name in options.modules]
    unknown = [name for name in modules if name not in TESTS_OF]
    if unknown:
        parser.error(f"no tests are known of {', '.join(unknown)}; known: {', '.join(TESTS_OF)}")
    results = []
    for module in modules:
        results.append(mutate(module, options.children))
        for name, change in results[-1].survivors.items():
            print(f"{name}\n{change}", flush=True)
    print(f"{'module':<24}{'mutants':>8}{'killed':>8}{'survived':>9}{'share':>8}")
    for result in results:
        left = len(result.survivors)
        numbers = f"{result.mutants:>8}{result.mutants - left:>8}{left:>9}{result.share:>8.1%}"
        print(f"{result.module:<24}{numbers}")


if __name__ == "__main__":
    main()
