"""What changes a task's digest, and what must not: a digest that changes loses trials."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from autoprec.workers.task_digest import source_digest, task_digest, whole_digest
from autoprec.workers.task_source import TaskSource

GOOD = """
def build_model():
    return object()

def build_data(batch_size):
    return []
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a task file, or a module beside it."""

    def task(text: str = GOOD, name: str = "a_task.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    return task


def test_a_change_of_anything_imported_from_beside_it_is_seen(write) -> None:
    path = write("import one\nfrom pkg import two\nfrom pkg.deep.three import x\n" + GOOD)
    files = ["one.py", "pkg/__init__.py", "pkg/two.py", "pkg/deep/__init__.py", "pkg/deep/three.py"]
    seen = {task_digest(path)}
    for name in files:
        write("x = 1", name)
        seen.add(task_digest(path))
        write("x = 2", name)
        seen.add(task_digest(path))
    assert len(seen) == 1 + 2 * len(files)


def test_comments_and_layout_change_nothing_and_code_does(write) -> None:
    path = write("import one\n" + GOOD)
    write("x = {'a': 1}", "one.py")
    before = task_digest(path)
    write("# what it is for\n\nimport one  # beside it\n" + GOOD + "\n\n# the end\n")
    write("x = {\n    'a': 1,  # one\n}", "one.py")
    assert task_digest(path) == before
    write("x = {'a': 1.0}", "one.py")
    assert task_digest(path) != before


def test_relative_imports_inside_a_package_are_followed(write) -> None:
    path = write("import pkg\n" + GOOD)
    write("from .inner import x\nfrom . import other\n", "pkg/__init__.py")
    write("from ..top import y\n", "pkg/sub/__init__.py")
    seen = {task_digest(path)}
    for name in ("pkg/inner.py", "pkg/other.py"):
        write("x = 1", name)
        seen.add(task_digest(path))
    assert len(seen) == 3


def test_what_is_not_imported_does_not_count(write) -> None:
    path = write()
    before = task_digest(path)
    write("x = 1", "unrelated.py")
    assert task_digest(path) == before


def test_a_link_out_of_the_folder_is_read(write, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "common.py").write_text("x = 1")
    path = write("import common\n" + GOOD, "job/a_task.py")
    (path.parent / "common.py").symlink_to(tmp_path / "elsewhere" / "common.py")
    before = task_digest(path)
    (tmp_path / "elsewhere" / "common.py").write_text("x = 2")
    assert task_digest(path) != before


def test_imports_that_go_round_end(write) -> None:
    path = write("import one\n" + GOOD)
    write("import two, a_task", "one.py")
    write("import one", "two.py")
    assert task_digest(path)


@pytest.mark.parametrize(
    "text",
    ["def (", "\0", "(" * 100_000, "-" * 200_000 + "1", "import " + "a." * 3000 + "b"],
    ids=["syntax", "null", "deep", "minus", "long name"],
)
def test_what_cannot_be_parsed_still_has_a_digest(write, text: str) -> None:
    assert len(task_digest(write(text))) == 64


# What the task reaches ----------------------------------------------------------------------------

TRAIN = """
import torch
from layers import Block

RATE = 1e-3

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block(WIDTH)

WIDTH = 8

def make_model():
    return Net()

def loader(batch_size):
    return [shuffled(batch_size)]

def shuffled(batch_size):
    return batch_size

def train(model, optimizer, batches):
    for inputs, targets in batches:
        outputs = model(inputs)
        loss = torch.nn.functional.mse_loss(outputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

def main():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    train(model, optimizer, loader(64))

if __name__ == "__main__":
    main()
"""

INTEGRATED = """
import argparse
import torch
from autoprec import apply_profile
from layers import Block

RATE = 1e-3
PROFILE = "a_task.profile.yaml"

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block(WIDTH)

WIDTH = 8

def make_model():
    return Net()

def loader(batch_size):
    return [shuffled(batch_size)]

def shuffled(batch_size):
    return batch_size

def train(model, optimizer, batches, precision):
    for inputs, targets in precision.batches(batches):
        with precision.autocast():
            outputs = model(inputs)
        loss = torch.nn.functional.mse_loss(outputs, targets)
        precision.backward(loss)
        precision.step()

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default=PROFILE)
    args = parser.parse_args()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    precision = apply_profile(args.profile, model=model, optimizer=optimizer)
    train(model, optimizer, loader(precision.batch_size), precision)

if __name__ == "__main__":
    main()
"""

FROM_TRAIN = """
from train import make_model as build_model
import train

def build_data(batch_size):
    return train.loader(batch_size)
"""


@pytest.fixture
def imported(write) -> Path:
    """A task that imports a training script, before that has a profile."""
    write("class Block: ...", "layers.py")
    write(TRAIN, "train.py")
    return write(FROM_TRAIN)


def test_integrating_a_profile_into_the_script_that_the_task_imports_changes_nothing(
    write, imported: Path
) -> None:
    before, whole = task_digest(imported), whole_digest(imported)
    write(INTEGRATED, "train.py")
    assert task_digest(imported) == before
    assert whole_digest(imported) != whole
    write(INTEGRATED.replace("RATE = 1e-3", "RATE = 0.1"), "train.py")
    assert task_digest(imported) == before  # the task's optimizer is another one


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("train.py", "WIDTH = 8", "WIDTH = 16"),
        ("train.py", "return batch_size", "return batch_size + 1"),
        ("train.py", "return Net()", "return Net().eval()"),
        ("train.py", "super().__init__()", "super().__init__(); self.rate = RATE"),
        ("train.py", "import torch\n", "import torch\ntorch.set_num_threads(1)\n"),
        ("train.py", "import torch\n", "import torch\nimport intel_extension\n"),
        ("layers.py", "class Block: ...", "class Block: x = 1"),
    ],
)
@pytest.mark.parametrize("script", [TRAIN, INTEGRATED])
def test_what_the_task_reaches_counts(
    script: str, file: str, old: str, new: str, write, imported: Path
) -> None:
    write(script, "train.py")
    before, path = task_digest(imported), imported.with_name(file)
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    assert task_digest(imported) != before


ONE_FILE = """
import torch
import torch.nn.functional as F

def build_model():
    return torch.nn.Linear(4, 1)

def build_data(batch_size):
    return []

def training_step(model, batch):
    inputs, targets = batch
    outputs = model(inputs)
    return F.mse_loss(outputs, targets)
"""


def test_lines_in_the_tasks_own_functions_that_only_use_autoprec_do_not_count(write) -> None:
    before = task_digest(write(ONE_FILE))
    text = ONE_FILE.replace(
        "    outputs = model(inputs)\n",
        "    with precision.autocast():\n        outputs = model(inputs)\n",
    )
    applied = (
        "import autoprec\n" + text + "\nprecision = autoprec.apply_profile('p.yaml', model=MODEL)\n"
        "precision.restore()\n"
    )
    assert task_digest(write(applied)) == before
    other = applied.replace("model(inputs)", "model(2 * inputs)")
    assert task_digest(write(other)) != before


def test_a_batch_that_a_profile_gives_is_the_tasks_own(write) -> None:
    before = task_digest(write())
    line = "from autoprec import load_profile\nBATCH_SIZE = load_profile('p').recipe.batch_size\n"
    assert task_digest(write(line + GOOD)) != before


def test_other_things_of_autoprec_count(write) -> None:
    text = "from simulated import SimulatedModel\n" + GOOD
    before = task_digest(write(text))
    assert before != task_digest(write())
    model = text.replace("return object()", "return SimulatedModel()")
    assert task_digest(write(model)) != before


UNNAMED = {
    "a module that is passed on": "import one\nMODEL = getattr(one, 'wide')\n",
    "all names": "import one\ndef build_model(): return one.find('wide')\n",
    "a registry": "import one, other\ndef build_model(): return one.KNOWN['wide']()\n",
    "subclasses": "import one, other\ndef build_model(): return one.Base.known()\n",
    "a star": "from one import *\ndef build_model(): return wide()\n",
    "a package": "import pkg\ndef build_model(): return pkg.inner.wide()\n",
    "a module in a package": "from pkg import inner\ndef build_model(): return inner.wide()\n",
    "what a module imports": "import again\ndef build_model(): return again.wide()\n",
    "inside a function": "def build_model():\n    from one import wide\n    return wide()\n",
}

ONE = """
KNOWN = {}

class Base:
    def __init_subclass__(cls): ...

def find(name):
    return globals()[name]

def register(made):
    KNOWN[made.__name__] = made
    return made

def wide(): ...
"""
OTHER = """
import one

@one.register
def wide(): ...

class Wide(one.Base):
    def wide(): ...
"""


def test_what_a_decorator_of_its_own_package_registers_counts(write) -> None:
    task = "import pkg.models\ndef build_model(): return pkg.KNOWN['wide']()\n"
    write("KNOWN = {}\ndef register(made): KNOWN[made.__name__] = made\n", "pkg/__init__.py")
    models = "from . import register\n@register\ndef wide(): return 4\n"
    write(models, "pkg/models.py")
    before = task_digest(write(task))
    write(models.replace("4", "8"), "pkg/models.py")
    assert task_digest(write(task)) != before


@pytest.mark.parametrize("text", UNNAMED.values(), ids=UNNAMED)
def test_what_may_be_reached_without_its_name_counts(text: str, write) -> None:
    write(ONE, "one.py")
    write(OTHER, "other.py")
    write("", "pkg/__init__.py")
    write("def wide(): ...", "pkg/inner.py")
    write("from one import wide", "again.py")
    path = write(GOOD.replace("build_model", "model") + text)
    before = task_digest(path)
    for name in ("one.py", "other.py", "pkg/inner.py"):
        file = path.with_name("a").parent / name
        file.write_text(file.read_text().replace("def wide(): ...", "def wide(): return 2"))
    assert task_digest(path) != before


def test_a_long_chain_of_functions_is_followed(write) -> None:
    chain = "".join(f"def f{n}(): return f{n + 1}()\n" for n in range(2000))
    text = GOOD.replace("object()", "f0()") + chain + "def f2000(): return {}\n"
    assert task_digest(write(text.format(1))) != task_digest(write(text.format(2)))


def test_what_it_trains_in_today_changes_nothing_unless_the_task_reads_it(write) -> None:
    before = task_digest(write())
    assert task_digest(write('BASELINE = "bf16"\n' + GOOD)) == before
    read = GOOD.replace("object()", "BASELINE")
    first = task_digest(write('BASELINE = "bf16"\n' + read))
    assert task_digest(write('BASELINE = "fp16"\n' + read)) != first


FITS = """
import keras

BATCH = 32
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
data = keras.datasets.boston_housing.load_data()
model.fit(*data.batch(BATCH), batch_size=BATCH, epochs=2)
"""


def test_the_batch_of_a_script_is_what_was_captured(write) -> None:
    def digest(text: str, batch: str) -> str:
        return source_digest(TaskSource(write(text, "train.py"), script=True), batch)

    applied = FITS.replace("BATCH = 32", "BATCH = 32\nprecision = apply_profile('a.yaml')")
    applied = applied.replace("(BATCH)", "(precision.batch_size)")
    applied = applied.replace("batch_size=BATCH", "batch_size=precision.batch_size")
    applied = applied.replace(
        "import keras\n", "import keras\nfrom autoprec import apply_profile\n"
    )
    assert digest(applied, "32") == digest(FITS, "32") != digest(FITS, "64")
    assert digest(FITS.replace("epochs=2", "epochs=3"), "32") != digest(FITS, "32")
    assert digest(applied, "") != digest(FITS, "")
