"""One framework in a process: which test files a run may import, and which marker they carry.

torch and TensorFlow in one interpreter is fragile, and merely collecting a test file imports what
it imports. So files are sorted before they are loaded, by what stands in them: a file that imports
a framework (or one of our backends for it) gets that framework's marker, and is left alone by a run
whose `-m` leaves the marker out. `make tests` runs the parts one after another.
"""

from __future__ import annotations

import ast
import gc
import itertools
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.slow_marks import SlowMarks

if TYPE_CHECKING:
    from autoprec.core.recipe import Recipe
    from autoprec.workers.client import Worker
    from tests.fork_server import ForkServer

TESTS = Path(__file__).parent

#: Child processes use this checkout, and find the frameworks in tests/frameworks as if installed.
PLACES = [str(TESTS.parent), str(TESTS / "frameworks"), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, PLACES))

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow's greeting is no test output
# Small steps run a few times: XLA takes longer to optimize their code than it takes to run it.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
os.environ["AUTOPREC_CATALOGUE"] = ""  # device rows of whoever runs the tests are no part of them
os.environ["AUTOPREC_CACHE"] = ""  # nor is what was measured on their machine

# The same examples in every run, so that a run fails for what was changed; CI looks at others each
# time (.ci/run sets the variable). A busy machine fails no test.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("others", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

MARKER_OF = {"torch": "torch", "tensorflow": "keras", "keras": "keras"}
OTHER_MARKERS = ("gpu", "integrations", "release", "scale", "slow", "zoo")
SIMULATED_TASK = """
from simulated import SimulatedModel

def build_model():
    return SimulatedModel({arguments})

def build_data(batch_size):
    return []
"""
ALWAYS_PRELOADED = ("autoprec.workers", "autoprec.core", "autoprec.backends.shared")
PRELOADED = {
    "": ("simulated.backend",),
    "torch": ("autoprec.backends.torch", "torch._dynamo"),  # an optimizer imports it
    "keras": ("autoprec.backends.keras",),
}
LOADED = pytest.StashKey[dict[str, Path]]()  # the first file loaded for each framework


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole-table", action="store_true", help="every cell of test_keras_table, not a part"
    )
    parser.addoption(
        "--slow-marks", choices=("tell", "error"), default="tell", help="see tests/slow_marks.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # of a shell in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[LOADED] = {}
    config.pluginmanager.register(SlowMarks(config.option.slow_marks == "error"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files and folders none of whose tests `-m` can select, before they are imported."""
    markers, others = markers_of(collection_path), other_markers_of(collection_path)
    wanted = all(wants(config.option.markexpr, m, others) for m in markers or {""})
    return None if wanted else True


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Refuse to import the second framework's first file."""
    if not isinstance(collector, pytest.Module):
        return
    loaded = collector.config.stash[LOADED]
    for marker in markers_of(collector.path):
        loaded.setdefault(marker, collector.path)
    if len(loaded) > 1:
        raise pytest.UsageError(
            "torch and TensorFlow tests in one process: "
            + " and ".join(str(path) for path in loaded.values())
            + ". Choose one with -m torch, -m keras or -m 'not torch and not keras', "
            "or run all of them with `make tests`."
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test in a framework's file its marker, so that none is left out of every part.

    Files with slow tests come first, also where those are left out, and of these files first what
    only CI runs, of which a test takes minutes: one that starts last leaves the other processes
    idle.
    """
    for item in items:
        for marker in markers_of(item.path):
            item.add_marker(marker)
        seen = {*other_markers_of(item.path), *markers_of(item.path)}
        for marker in (*OTHER_MARKERS, *MARKER_OF.values()):
            if item.get_closest_marker(marker) and marker not in seen:
                raise pytest.UsageError(
                    f"{item.nodeid} is marked `{marker}`, which does not stand in its own file: a "
                    f"run of `-m {marker}` passes the file over. Write pytest.mark.{marker} there."
                )
    long = {
        item.path
        for item in items
        if any(map(item.get_closest_marker, ("release", "scale", "zoo")))
    }
    items.sort(key=lambda item: ("slow" not in other_markers_of(item.path), item.path not in long))


@pytest.fixture(scope="session", autouse=True)
def one_framework() -> Iterator[None]:
    """Fail a run in which both frameworks were loaded after all, by an import inside a test."""
    yield
    if {"torch", "tensorflow"} <= sys.modules.keys():
        pytest.fail("both torch and tensorflow were imported into this test process")


@pytest.fixture(scope="session", autouse=True)
def impatience() -> Iterator[None]:
    """Let no tuning wait for other processes: two files of tests run side by side."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoprec.tuning.job.PATIENCE_SECONDS", 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def folder_of_its_own() -> Iterator[None]:
    """Give each process of tests its temporary files, and with them its devices' locks.

    A short path: sockets lie below it, whose paths have at most 107 bytes.
    """
    with (
        tempfile.TemporaryDirectory(prefix="t", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", folder)
        patch.setattr("tempfile.tempdir", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def forked(request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    """Fork the workers of tunings from a process that has imported the framework already.

    A test forks what it would start as `python FILE ...` by `forked.run(FILE, ...)`.
    """
    from tests.fork_server import ForkServer, forked_workers

    loaded = next(iter(request.config.stash[LOADED]), "")
    server = ForkServer((*ALWAYS_PRELOADED, *PRELOADED[loaded]))
    with forked_workers(server):
        yield server
    server.stop()


@pytest.fixture
def forked_runs(forked: ForkServer) -> Iterator[None]:
    """Fork the runs of `verify --script`, too: a run imports its framework as long as it trains."""
    from autoprec.tuning.flow import script_verification
    from tests.fork_server import forked_from

    with forked_from(forked, script_verification):
        yield


@pytest.fixture(scope="module", autouse=True)
def old_objects() -> None:
    """Keep what a framework and earlier files made out of every later search for garbage."""
    gc.collect()
    gc.freeze()


@cache
def markers_of(path: Path) -> frozenset[str]:
    """Return the markers of the frameworks that loading this file or folder imports."""
    parts = path.relative_to(TESTS).parts if path.is_relative_to(TESTS) else ()
    words = {word for part in parts for word in part.removesuffix(".py").split("_")}
    folders = {MARKER_OF[word] for word in words & MARKER_OF.keys()}
    if path.suffix != ".py":
        return frozenset(folders)
    text = path.read_text(encoding="utf-8")
    if not any(framework in text for framework in MARKER_OF):
        return frozenset(folders)
    try:
        tree = ast.parse(text)
    except SyntaxError:  # pytest shows it better
        return frozenset(folders)
    inner = [node for part in tree.body for node in _run_at_import(part)]
    return frozenset(folders | {marker for node in inner for marker in _markers_of_import(node)})


def _run_at_import(node: ast.AST) -> list[ast.AST]:
    """Return the node and what stands in it, except the insides of functions."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return []
    return [node, *(n for child in ast.iter_child_nodes(node) for n in _run_at_import(child))]


def _markers_of_import(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return set()
    names = [name.removeprefix("autoprec.backends.") for name in names]
    return {MARKER_OF[top] for name in names if (top := name.partition(".")[0]) in MARKER_OF}


@cache
def other_markers_of(path: Path) -> tuple[str, ...]:
    """Return which markers tests in this file or folder may carry besides `markers_of`."""
    own = markers_of(path)
    free = OTHER_MARKERS if own else (*OTHER_MARKERS, *sorted({*MARKER_OF.values()}))
    if path.suffix != ".py":
        return free
    text = path.read_text(encoding="utf-8")
    return tuple(marker for marker in free if f"mark.{marker}" in text)


@cache
def wants(expression: str, marker: str, others: tuple[str, ...]) -> bool:
    """Return whether a `-m` expression can select a test with `marker` and some of `others`."""
    if not expression:
        return True
    subsets = product((False, True), repeat=len(others))
    choices = (dict(zip(others, chosen, strict=True)) for chosen in subsets)
    return any(eval(expression, {"__builtins__": {}}, _Names(c, marker)) for c in choices)


class _Names(dict[str, bool]):
    """The names in a mark expression: true for the markers a test carries."""

    def __init__(self, others: dict[str, bool], marker: str) -> None:
        super().__init__(others, **{marker: True})

    def __missing__(self, name: str) -> bool:
        return False


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let surveys and comparisons end with the data, however busy the machine is."""
    shared = "autoprec.backends.shared"
    monkeypatch.setattr(f"{shared}.batch_survey.Limits.reached", lambda *_: False)
    monkeypatch.setattr(f"{shared}.batch_splits._SECONDS", float("inf"))


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the device's own products untimed, which takes seconds and has its own tests."""
    monkeypatch.setattr("autoprec.probing.measure_device", lambda facts, frameworks: facts)


@pytest.fixture
def in_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the workers of tunings in this process, but in a test with `real_workers`.

    The draws of simulated sessions begin anew, whatever ran before, and other processes cannot
    disturb them. Nothing waits for a disk, or for threads of other workers to sleep.
    """
    if "real_workers" in request.fixturenames:
        return
    from simulated import backend
    from simulated.in_process import InProcessWorker

    monkeypatch.setattr(backend, "_SESSION_NUMBERS", itertools.count())
    monkeypatch.setattr("autoprec.workers.rank_group.Worker", InProcessWorker)
    usage = "autoprec.workers.cpu_contention.ProcessorUsage._read"
    monkeypatch.setattr(usage, lambda meter, pids: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    pause = "autoprec.tuning.race.sessions._WORKER_SWITCH_PAUSE_SECONDS"
    monkeypatch.setattr(pause, 0.0)


@pytest.fixture
def real_workers() -> None:
    """Have processes as workers in a file of tests that are `in_process`: for what ends them."""


@pytest.fixture
def write_profile(tmp_path: Path) -> Callable[[Recipe, str], Path]:
    """Return a function that writes a recipe as a profile of this machine's CPU."""
    from factories import profile_of

    from autoprec.api import device_fingerprint
    from autoprec.profiles import save_profile

    def write(recipe: Recipe, framework: str) -> Path:
        path = tmp_path / "model.profile.yaml"
        save_profile(profile_of(recipe, framework, device_fingerprint("cpu")), path)
        return path

    return write


@pytest.fixture
def simulated(tmp_path: Path) -> Callable[..., Path]:
    """Write a task file whose model has these fields."""

    def write(**fields: Any) -> Path:
        path = tmp_path / "simulated_task.py"
        arguments = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        path.write_text(SIMULATED_TASK.format(arguments=arguments), encoding="utf-8")
        return path

    return write


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    """Start workers that are ended after the test."""
    from autoprec.workers.client import Worker, WorkerSettings
    from autoprec.workers.task_source import TaskSource

    made: list[Worker] = []

    def begin(task: Path, **settings: Any) -> Worker:
        made.append(Worker(WorkerSettings(TaskSource(task), **settings)))
        return made[-1]

    yield begin
    for worker in made:
        worker.kill()
