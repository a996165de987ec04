"""Task files: what is wrong with one is said in one sentence, and what it imports is known."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autoprec.core.dtypes import Policy
from autoprec.errors import TaskError, UsageError, UserCodeError
from autoprec.workers.task_file import (
    check_task_path,
    load_task,
    present_policy,
    raised_by_autoprec,
    user_frames,
)

GOOD = """
def build_model():
    return object()

def build_data(batch_size):
    return []
"""


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Write a task file under a name of its own; forget afterwards what loading it left behind."""
    path_before, argv_before = list(sys.path), list(sys.argv)
    modules = set(sys.modules)

    def task(text: str = GOOD, name: str = "a_task.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    yield task
    sys.path[:], sys.argv[:] = path_before, argv_before
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(
            sys.modules[name].__file__
        ):
            del sys.modules[name]
    sys.modules.pop("a_task", None)


# The path ----------------------------------------------------------------------------------------


def test_a_path_is_made_absolute(write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write()
    monkeypatch.chdir(path.parent)
    assert check_task_path("a_task.py") == path


@pytest.mark.parametrize(
    ("name", "said"),
    [("none.py", "no task file"), ("", "not a Python file"), ("notes.txt", "not a Python file")],
)
def test_what_is_no_python_file_is_refused(write, name: str, said: str) -> None:
    folder = write("", "notes.txt").parent
    with pytest.raises(UsageError, match=said):
        check_task_path(folder / name)


def test_a_folder_named_like_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.py").mkdir()
    with pytest.raises(UsageError, match="not a Python file"):
        check_task_path(tmp_path / "x.py")


# Loading -----------------------------------------------------------------------------------------


def test_a_good_file_is_a_task(write) -> None:
    task = load_task(write(GOOD + "BATCH_SIZE = 64\nCLIP_GRAD_NORM = 1\n"))
    assert (task.name, task.batch_size, task.clip_grad_norm) == ("a_task.py", 64, 1.0)
    assert task.loss_fn is task.count_samples is None
    counting = load_task(write(GOOD + "def count_samples(batch): return 3\n", "counts.py"))
    assert counting.count_samples is not None
    assert counting.count_samples([]) == 3


def test_a_module_beside_it_can_be_imported(write) -> None:
    write("value = 7", "beside_it.py")
    assert load_task(write("from beside_it import value\nBATCH_SIZE = value\n" + GOOD))


WRONG = {
    "a syntax error": ("def build_model(:\n    pass", r"a_task\.py, line 1: .*"),
    "an indentation error": ("def f():\nreturn 1", r"a_task\.py, line 2"),
    "nothing": ("", "defines no function build_model"),
    "no build_data": ("def build_model(): ...", "defines no function build_data"),
    "a model in place of a function": (
        GOOD + "build_model = 3",
        "build_model is a int, expected a function",
    ),
    "a loss that is no function": (GOOD + "loss_fn = 'mse'", "loss_fn is a str"),
    "build_model with arguments": (
        "def build_model(width): ...\ndef build_data(batch_size): ...",
        r"build_model cannot be called as build_model\(\) -> model: .*width",
    ),
    "build_data without arguments": (
        "def build_model(): ...\ndef build_data(): ...",
        r"build_data cannot be called as build_data\(batch_size\)",
    ),
    "a loss of one argument": (
        GOOD + "def loss_fn(outputs): ...",
        r"loss_fn cannot be called as loss_fn\(outputs, targets\)",
    ),
    "a count of nothing": (
        GOOD + "def count_samples(): ...",
        r"count_samples cannot be called as count_samples\(batch\) -> int",
    ),
    "sys.exit": ("import sys\nsys.exit(3)", r"sys\.exit\(3\).*__main__"),
    "a batch of text": (GOOD + "BATCH_SIZE = '32'", "expected a positive integer"),
    "a batch of half": (GOOD + "BATCH_SIZE = 0.5", "expected a positive integer"),
    "a batch of true": (GOOD + "BATCH_SIZE = True", "expected a positive integer"),
    "no batch": (GOOD + "BATCH_SIZE = 0", "expected a positive integer"),
    "a clip of nan": (GOOD + "CLIP_GRAD_NORM = float('nan')", "expected a positive number"),
    "a clip of infinity": (GOOD + "CLIP_GRAD_NORM = float('inf')", "expected a positive number"),
}


@pytest.mark.parametrize(("text", "said"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said(write, text: str, said: str) -> None:
    with pytest.raises(TaskError, match=said) as info:
        load_task(write(text))
    assert not isinstance(info.value, UserCodeError)
    assert "\n" not in str(info.value)


def test_a_file_that_is_no_text_is_said_so(write) -> None:
    path = write()
    path.write_bytes(b"\x00\xff\xfe not python")
    with pytest.raises(TaskError):
        load_task(path)


def test_an_exception_at_import_shows_the_users_frames(write) -> None:
    path = write("def inner():\n    raise ValueError('mine')\ninner()\n")
    with pytest.raises(UserCodeError) as info:
        load_task(path)
    assert str(info.value) == "a_task.py raised ValueError while it was imported: mine"
    assert "in inner" in info.value.frames
    assert "importlib" not in info.value.frames
    assert "taskfile.py" not in info.value.frames


@pytest.mark.parametrize("name", ["json.py", "random.py", "sys.py"])
def test_a_name_of_the_standard_library_is_refused(write, name: str) -> None:
    with pytest.raises(TaskError, match="rename the task file"):
        load_task(write(GOOD, name))


def test_a_decorated_function_and_a_callable_object_will_do(write) -> None:
    load_task(
        write(
            GOOD
            + """
            import functools

            class Data:
                def __call__(self, batch_size): return []

            build_data = Data()
            build_model = functools.lru_cache(build_model)
            evaluate = functools.partial(print, end="")
            loss_fn = max
            """.replace("            ", "")
        )
    )


# Names that are nearly right ----------------------------------------------------------------------

MISSPELT = {
    "swapped letters": ("BATCH_SZIE = 64", "BATCH_SZIE = 64 is not read; did you mean BATCH_SIZE"),
    "small letters": ("batch_size = 64", "batch_size = 64 is not read; did you mean BATCH_SIZE"),
    "one letter less": ("CLIP_GRAD_NOR = 1.0", "did you mean CLIP_GRAD_NORM"),
    "imported": ("from settings import BATCHSIZE", "BATCHSIZE = 8 is not read"),
    "a baseline": ("BASLINE = 'bf16'", "did you mean BASELINE"),
    "british": ("def build_optimiser(model): ...", "did you mean build_optimizer"),
    "a function": ("def evalute(model): ...", r"evalute\(\) is not read; did you mean evaluate"),
}


@pytest.mark.parametrize(("text", "said"), MISSPELT.values(), ids=MISSPELT)
def test_a_name_that_is_nearly_one_that_is_read_is_asked_about(write, text: str, said: str) -> None:
    write("BATCHSIZE = 8", "settings.py")
    with pytest.raises(TaskError, match=said):
        load_task(write(GOOD + text))


OWN = {
    "the real one is there": "BATCH_SIZE = 64\nBATCH_SIZES = (32, 64)",
    "another word": "BATCHES = 20\nSIZE = 3\nEPOCHS = 2",
    "called otherwise": "def train_step(model, batch, optimizer): ...",
    "private": "_BATCH_SZIE = 1",
    "a module": "import settings as batch_size",
    "a library's": "from functools import partial as evaluate_",
}


@pytest.mark.parametrize("text", OWN.values(), ids=OWN)
def test_names_of_the_tasks_own_are_left_alone(write, text: str) -> None:
    write("x = 1", "settings.py")
    load_task(write(GOOD + text))


# What it trains in today -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("", None),
        ('BASELINE = "mixed_bfloat16"', Policy.MIXED_BFLOAT16),
        ('BASELINE: str = "fp16"', Policy.MIXED_FLOAT16),
        ('BASELINE = "fp16"\nBASELINE = "float32"', Policy.FLOAT32),
        ("BASELINE: str", None),
    ],
)
def test_the_policy_of_the_present_training_is_read_from_the_text(
    write, text: str, policy: Policy | None
) -> None:
    path = write(GOOD + text)
    assert present_policy(path) is policy
    load_task(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("BASELINE = 0.93", r"BASELINE = 0\.93 given; expected a policy's name as text"),
        ("BASELINE = 'bf-16x'", r"a_task\.py: BASELINE: .*bf-16x.*rename it"),
        ("BASELINE = 'bf' + '16'", "BASELINE = 'bf' \\+ '16' given; expected a policy's name"),
        ("if True:\n    BASELINE = 'bf16'", "not assigned where the file shows it; expected"),
        ("from settings import BASELINE", "not assigned where the file shows it; expected"),
    ],
)
def test_a_present_policy_that_cannot_be_read_is_told(write, text: str, said: str) -> None:
    write("BASELINE = 'bf16'", "settings.py")
    with pytest.raises(TaskError, match=said):
        load_task(write(GOOD + text))


# Frames ------------------------------------------------------------------------------------------


def caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError


def test_what_led_to_an_exception_is_shown_first() -> None:
    def fails() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second")  # noqa: B904

    shown = user_frames(caught(fails))
    assert shown.index("KeyError") < shown.index("ValueError")


def test_a_hidden_context_is_not_shown() -> None:
    def fails() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            raise ValueError("second") from None

    assert "KeyError" not in user_frames(caught(fails))


def test_a_folder_whose_name_begins_like_ours_is_the_users() -> None:
    import autoprec

    name = str(Path(autoprec.__file__).parent) + "_experiments/model.py"
    code = compile("1 / 0", name, "exec")
    error = caught(lambda: exec(code))
    assert f'File "{name}"' in user_frames(error)
    assert not raised_by_autoprec(error)


def test_of_a_frameworks_frames_only_the_last_is_shown() -> None:
    folder = "/opt/python/site-packages/torch/nn"
    inner = compile("def forward(): return 1 / 0", f"{folder}/linear.py", "exec")
    outer = compile("def call(forward): return forward()", f"{folder}/module.py", "exec")
    names: dict[str, Callable[..., object]] = {}
    exec(inner, names)
    exec(outer, names)
    shown = user_frames(caught(lambda: names["call"](names["forward"])))
    assert "linear.py" in shown
    assert "module.py" not in shown
    assert Path(__file__).name in shown


def test_of_a_traceback_inside_a_message_the_frameworks_frames_are_left_out() -> None:
    told = [
        "Caught KeyError in DataLoader worker process 0.",
        "Original Traceback (most recent call last):",
        '  File "/opt/site-packages/torch/utils/data/fetch.py", line 3, in fetch',
        "    data = self.dataset[index]",
        "           ~~~~~~~~~~~~^^^^^^^",
        '  File "/home/me/rows.py", line 7, in __getitem__',
        "    return self.rows[index]",
        "KeyError: 'seven'",
    ]

    def fails() -> None:
        raise ValueError("\n".join(told))

    shown = user_frames(caught(fails))
    assert "fetch.py" not in shown
    assert "~~~~" not in shown
    assert all(line in shown for line in (*told[:2], *told[5:]))


def test_an_exception_without_words_has_frames() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fails() -> None:
        raise Mute

    assert "Mute" in user_frames(caught(fails))


def test_a_loop_of_causes_ends() -> None:
    a, b = ValueError("a"), ValueError("b")
    a.__cause__, b.__cause__ = b, a
    assert user_frames(a)
