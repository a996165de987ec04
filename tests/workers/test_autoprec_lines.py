"""A task's digest leaves out lines that integrate a profile, however they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.workers.task_digest import task_digest

TASK = "from train import make_model as build_model, loader as build_data, step as training_step\n"

TRAIN = """
import torch

class Trainer:
    def __init__(self, width):
        self.model = torch.nn.Linear(width, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def scores(self, x):
        return self.model(x)

def make_model():
    return Trainer(4).model

def loader(batch_size):
    return [batch_size]

def step(model, batch):
    inputs, targets = batch
    outputs = model(inputs)
    return (outputs - targets).square().mean()

def main():
    Trainer(4)
"""

IMPORT = "import torch\n"
MADE = "        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)\n"
MAIN = "def main():\n"
APPLY = "ap.apply_profile('p.yaml', model=self.model, optimizer=self.optimizer)"
TOP = "precision = ap.apply_profile('p.yaml', model=torch.nn.Linear(4, 1))\n"

ADDED: dict[str, tuple[tuple[str, str], ...]] = {
    "among other imports": ((IMPORT, "import torch, autoprec as ap\n"),),
    "an import that may fail": (
        (IMPORT, IMPORT + "try:\n    import autoprec as ap\nexcept ImportError:\n    ap = None\n"),
    ),
    "an import for annotations": (
        (
            IMPORT,
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from autoprec import Profile\n" + IMPORT,
        ),
    ),
    "another module of autoprec": (
        (
            IMPORT,
            IMPORT + "from autoprec.backends.torch.apply.padded_batches import Collate\n",
        ),
        (MAIN, MAIN + "    Collate(8)\n"),
    ),
    "under a name of its own": (
        (IMPORT, IMPORT + "from autoprec import apply_profile as ap\n"),
        (MAIN, MAIN + "    ap('p.yaml', model=make_model())\n"),
    ),
    "for a trainer": (
        (IMPORT, IMPORT + "from autoprec.integrations.transformers import apply\n"),
        (MADE, f"{MADE}        apply(self, 'p.yaml')\n"),
    ),
    "for an accelerator, under a name": (
        (IMPORT, IMPORT + "from autoprec.integrations.accelerate import bind as to\n"),
        (MADE, f"{MADE}        self.precision = to(self, 'p.yaml')\n"),
    ),
    "a plugin": (
        (IMPORT, IMPORT + "from autoprec.integrations.lightning import plugin\n"),
        ("    return Trainer(4).model", "    return Trainer(4, plugins=[plugin('p.yaml')]).model"),
    ),
    "a plugin in what is bound, alone": (
        (IMPORT, IMPORT + "from autoprec.integrations.lightning import plugin\n"),
        ("lr=0.1)", "lr=0.1, plugins=plugin('p.yaml'))"),
    ),
    "a plugin under a name": (
        (IMPORT, IMPORT + "from autoprec.integrations import lightning as of\n"),
        (
            MADE,
            "        precision = of.plugin('p.yaml')\n"
            + MADE.replace("lr=0.1)", "lr=0.1, plugins=[precision])"),
        ),
    ),
    "by the module's whole name": (
        (IMPORT, IMPORT + "import autoprec.integrations.transformers\n"),
        (MADE, f"{MADE}        autoprec.integrations.transformers.apply(self, 'p.yaml')\n"),
    ),
    "by the module's other name": (
        (IMPORT, IMPORT + "import autoprec.integrations.accelerate as to\n"),
        (MADE, f"{MADE}        self.precision = to.bind(self, 'p.yaml')\n"),
    ),
    "over ranks": (
        (IMPORT, IMPORT + "from autoprec import distribute\n"),
        (MADE, "        self.model = distribute('p.yaml', self.model)\n" + MADE),
    ),
    "in a method": (
        (IMPORT, "import autoprec as ap\n" + IMPORT),
        (MADE, f"{MADE}        self.precision = {APPLY}\n"),
    ),
    "imported where it is used": (
        (MADE, f"{MADE}        import autoprec as ap\n        self.precision = {APPLY}\n"),
    ),
    "for a loop of torch.amp": (
        (IMPORT, "import autoprec as ap\n" + IMPORT),
        (MADE, f"{MADE}        self.autocast, self.scaler = {APPLY}.amp\n"),
        ("class Trainer:", f"{TOP}autocast, scaler = precision.amp\n\nclass Trainer:"),
        (
            "    outputs = model(inputs)\n",
            "    with autocast():\n        outputs = model(inputs)\n",
        ),
    ),
    "where a file is there": (
        (IMPORT, "import os\nimport autoprec as ap\n" + IMPORT),
        (
            MADE,
            f"{MADE}        if os.path.exists('p.yaml'):\n            self.precision = {APPLY}\n"
            "        else:\n            self.precision = ap.apply_profile('off')\n",
        ),
    ),
    "as a test decides": (
        (IMPORT, "import autoprec as ap\n" + IMPORT),
        (MADE, f"{MADE}        self.precision = {APPLY} if torch.cuda.is_available() else None\n"),
    ),
    "only where a test says so": (
        (IMPORT, "import autoprec as ap\n" + IMPORT),
        (
            MADE,
            f"{MADE}        self.precision: object = None\n        if torch.cuda.is_available():\n"
            f"            self.precision = {APPLY}\n",
        ),
    ),
    "global": (
        (IMPORT, "import autoprec as ap\n" + IMPORT),
        (MADE, f"        global precision\n{MADE}        precision = {APPLY}\n"),
    ),
    "where it may fail": (
        (IMPORT, "import autoprec as ap\n" + IMPORT),
        (
            MADE,
            f"{MADE}        try:\n            self.precision = {APPLY}\n"
            "        except ap.AutoprecError:\n            self.precision = None\n",
        ),
    ),
    "a profile that is loaded before": (
        (IMPORT, "import autoprec as ap\n" + IMPORT),
        (
            MADE,
            f"{MADE}        profile = ap.load_profile('p.yaml')\n"
            "        self.precision = ap.apply_profile(profile, model=self.model)\n",
        ),
    ),
    "a batch for the loop alone": (
        (IMPORT, IMPORT + "import autoprec as ap\nSIZE = ap.load_profile('p').recipe.batch_size\n"),
        (MAIN, MAIN + "    loader(SIZE)\n"),
    ),
    "a log": (
        (IMPORT, "import autoprec as ap\n" + IMPORT),
        (MADE, f"{MADE}        ap.log_to(None, 'p.yaml')\n"),
    ),
    "decorators": (
        (IMPORT, "import autoprec as ap\n" + IMPORT),
        ("class Trainer:", TOP + "\nclass Trainer:"),
        ("def step(", "@precision.autocast()\ndef step("),
        ("    def scores(", "    @precision.autocast()\n    def scores("),
    ),
    "around lines, or nothing": (
        (IMPORT, "from contextlib import nullcontext\nimport autoprec as ap\n" + IMPORT),
        ("class Trainer:", TOP + "\nclass Trainer:"),
        (
            "    outputs = model(inputs)\n",
            "    with precision.autocast() if precision else nullcontext():\n"
            "        outputs = model(inputs)\n",
        ),
    ),
    "around lines, under a name": (
        (IMPORT, "import autoprec as ap\n" + IMPORT),
        ("class Trainer:", TOP + "\nclass Trainer:"),
        (
            "    outputs = model(inputs)\n",
            "    context = precision.autocast()\n    with context:\n"
            "        outputs = model(inputs)\n",
        ),
    ),
    "around lines, beside others": (
        (IMPORT, "import autoprec as ap\n" + IMPORT),
        ("class Trainer:", TOP + "\nclass Trainer:"),
        (
            "    outputs = model(inputs)\n",
            "    with precision.autocast():\n        outputs = model(inputs)\n",
        ),
    ),
}

CHANGES = (("lr=0.1", "lr=0.2"), ("width, 1", "width, 2"), ("[batch_size]", "[2 * batch_size]"))


def changed(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


@pytest.fixture
def digest(tmp_path: Path):
    """Digest a task with the training script that it imports."""

    def of(script: str, task: str = TASK) -> str:
        (tmp_path / "task.py").write_text(task)
        (tmp_path / "train.py").write_text(script)
        return task_digest(tmp_path / "task.py")

    return of


@pytest.mark.parametrize("added", ADDED.values(), ids=ADDED)
def test_lines_that_integrate_a_profile_do_not_count_and_all_others_do(added, digest) -> None:
    integrated = changed(TRAIN, *added)
    assert digest(integrated) == digest(TRAIN)
    for change in CHANGES:
        assert digest(changed(integrated, change)) == digest(changed(TRAIN, change))
        assert digest(changed(integrated, change)) != digest(TRAIN)


def test_what_else_has_the_name_of_a_result_counts(digest) -> None:
    measured = ("class Trainer:", "precision = 0.5\nclass Trainer:")
    given = ("    outputs = model(inputs)\n", "    outputs = model(inputs) * precision\n")
    integrated = (IMPORT, "import autoprec as ap\n" + IMPORT), (MAIN, f"{MAIN}    {TOP}")
    script = changed(TRAIN, measured, given, *integrated)
    assert digest(script) == digest(changed(TRAIN, measured, given))
    assert digest(script) != digest(changed(script, ("= 0.5", "= 0.6")))
    whole = changed(TRAIN, (IMPORT, "from autoprec import distribute\n" + IMPORT))
    other = changed(whole, (MADE, f"{MADE}        self.shared = distribute('p', self.model)\n"))
    assert digest(other) != digest(whole)


def test_of_two_statements_in_a_line_the_users_own_counts(digest) -> None:
    line = MADE.rstrip() + f"; self.precision = {APPLY}\n"
    integrated = changed(TRAIN, (IMPORT, "import autoprec as ap\n" + IMPORT), (MADE, line))
    assert digest(integrated) == digest(TRAIN)
    assert digest(changed(integrated, ("lr=0.1", "lr=0.2"))) != digest(TRAIN)


@pytest.mark.parametrize(
    "size",
    [
        "PROFILE = ap.load_profile('p.yaml')\nSIZE = PROFILE.recipe.batch_size\n",
        "SIZE = ap.load_profile('p.yaml').recipe.batch_size\n",
        "def size():\n"
        "    profile = ap.load_profile('p.yaml')\n"
        "    return profile.recipe.batch_size\n"
        "SIZE = size()\n",
    ],
)
def test_what_a_task_takes_from_a_profile_counts(size: str, digest) -> None:
    script = changed(
        TRAIN, (IMPORT, IMPORT + "import autoprec as ap\n" + size), ("[batch_size]", "[SIZE]")
    )
    assert digest(script) != digest(changed(script, ("'p.yaml'", "'other.yaml'")))
    plain = changed(TRAIN, (IMPORT, IMPORT + "SIZE = 8\n"), ("[batch_size]", "[SIZE]"))
    assert digest(script) != digest(plain)
