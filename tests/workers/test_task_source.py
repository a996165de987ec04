"""What is tuned: which kind a file is, what is refused, and what makes another digest."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprec.core.codec import from_plain, to_plain
from autoprec.errors import TaskError, UsageError
from autoprec.workers.task_digest import source_digest, task_digest
from autoprec.workers.task_source import TaskSource, read_source

Write = Callable[..., Path]

TASK = "def build_model(): ...\ndef build_data(batch_size): ...\n"
FITS = "trainer.fit(module)\n"

KINDS = {
    "a task file": (TASK, False),
    "a task file that trains when it is run": (TASK + FITS, False),
    "one that trains": (FITS, True),
    "an empty one": ("", True),
    "a task file that misses one": ("def build_model(): ...", False),
    "a task file that spells one nearly right": (
        "def build_model(): ...\ndef build_dta(n): ...",
        0,
    ),
    "a script whose function is called so": ("def build_model(): ...\n" + FITS, True),
    "a task file of imported functions": ("from parts import build_model, build_data", False),
    "a task file of all that another has": ("from parts import *", False),
    "a script that imports both": ("from parts import build_data, build_model\n" + FITS, True),
    "a task file that decides": (f"if True:\n{textwrap.indent(TASK, '    ')}else: pass", False),
    "a task file of values": ("build_model, build_data = functions", False),
    "a script whose data take no batch size": (
        "def build_model(): ...\ndef build_data(): ...\nif True:\n    loss.backward()",
        True,
    ),
    "a task file whose data take none by mistake": (
        "def build_model(): ...\ndef build_data(): ...",
        False,
    ),
    "a function inside another": ("def main():\n    def build_model(): ...", True),
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write train.py, beside parts.py, which defines what a task file does."""
    (tmp_path / "parts.py").write_text(TASK)

    def file(text: str = FITS, name: str = "train.py") -> Path:
        (tmp_path / name).write_text(textwrap.dedent(text))
        return tmp_path / name

    return file


@pytest.mark.parametrize(("text", "script"), KINDS.values(), ids=KINDS)
def test_what_a_file_defines_says_which_kind_it_is(write: Write, text: str, script: bool) -> None:
    path = write(text)
    assert read_source(path) == TaskSource(path, script=bool(script))
    assert read_source(path, script=True).script


def test_a_function_is_named_after_a_colon(write: Write) -> None:
    path = write(TASK)
    source = read_source(f"{path}:build", arguments=["--lr", "1"])
    assert source == TaskSource(path, "build", ("--lr", "1"))
    assert (source.name, str(source)) == ("train.py:build", f"{path}:build -- --lr 1")
    assert not source.plain
    assert read_source(write(name="a:b.py")).function is None


def test_it_travels_between_processes(write: Write) -> None:
    source = read_source(write(), arguments=["--name", "a b"], at=2)
    assert from_plain(TaskSource, to_plain(source)) == source
    assert str(source).endswith("train.py -- --name 'a b'")


@pytest.mark.parametrize(
    ("given", "settings", "error", "said"),
    [
        ("none.py", {}, UsageError, "no task file"),
        ("train.py:not a name", {}, UsageError, "expected a function's name after the colon"),
        ("train.py:build", {"at": 2}, UsageError, "leave out `at`, or `:build`"),
        ("train.py:build", {"script": True}, UsageError, "leave out `script`"),
        ("parts.py", {"arguments": ["--lr", "1"]}, UsageError, "arguments --lr 1 given, but parts"),
        ("parts.py", {"at": 2}, UsageError, "`at` 2 given, but parts.py is a task file"),
        ("wrong.py", {}, TaskError, "wrong.py, line 1"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(
    write: Write, given: str, settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    folder = write().parent
    write("def f(:", "wrong.py")
    with pytest.raises(error, match=re.escape(said)):
        read_source(folder / given if ":" not in given else f"{folder}/{given}", **settings)


# The digest --------------------------------------------------------------------------------------

SCRIPT = """
from parts import build_model
import other

def unused(): return 1

def main():
    return fit(build_model())

if __name__ == "__main__":
    main()
"""


def test_a_task_files_digest_is_that_of_its_code(write: Write) -> None:
    path = write(TASK)
    assert source_digest(read_source(path)) == task_digest(path)


def test_of_a_script_counts_all_that_it_runs_and_how(write: Write) -> None:
    source = read_source(write(SCRIPT))
    digests = {source_digest(source)}
    for change in (
        ("main()\n", "main(); main()\n"),  # under the main guard
        ("fit(build_model())", "fit(build_model(), 2)"),
    ):
        write(SCRIPT.replace(*change))
        digests.add(source_digest(source))
    write(SCRIPT)
    for other in (
        TaskSource(source.path, arguments=("--lr", "1"), script=True),
        TaskSource(source.path, arguments=("--lr 1",), script=True),
        TaskSource(source.path, at=2, script=True),
        TaskSource(source.path, "main"),
    ):
        digests.add(source_digest(other))
    digests.add(source_digest(source, "a fingerprint"))
    write("def build_model(): return 1", "parts.py")
    digests.add(source_digest(source))
    assert len(digests) == 9
    write(SCRIPT.replace("return 1", "return 2") + "# a comment\n")
    assert source_digest(source) in digests
