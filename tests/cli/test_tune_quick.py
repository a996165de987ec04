"""`autoprec tune --quick`: what leads after a short search, and nothing that could be applied."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoprec.profiles import load_profile
from tests.cli.commands import QUICK, Run, Write, one_sentence, trials

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="workers need POSIX"),
    pytest.mark.usefixtures("unmeasured", "in_process"),
]


def test_it_says_what_leads_and_the_tuning_goes_on_from_its_trials(
    write: Write, run: Run, tmp_path: Path
) -> None:
    task = write()
    code, out, err = run(task, *QUICK, "--quick")
    assert code == 0
    answer, then = out.splitlines()
    assert answer.startswith("so far: mixed_bfloat16, batch ")
    assert answer.endswith(
        "by a short timing; neither compared in turns nor checked against float32 yet"
    )
    assert then.startswith("no profile was written")
    assert "comparison" not in err
    assert "check:" not in err
    assert not list(tmp_path.glob("*.yaml"))
    before = trials(err)
    code, out, err = run(task, *QUICK)
    assert (code, out) == (0, "")
    assert f"resuming after {len(before)} finished trials" in err
    assert not set(before) & set(trials(err))
    assert load_profile(tmp_path / "model_x.profile.yaml").recipe.policy == "mixed_bfloat16"


@pytest.mark.parametrize("words", [("--output", "p.yaml"), ("--report",), ("--json",)])
def test_what_asks_for_a_profile_is_refused(write: Write, run: Run, words: tuple[str, ...]) -> None:
    code, out, err = run(write(), *QUICK, "--quick", *words)
    assert (code, out) == (2, "")
    assert "--quick writes no profile; omit --output, --report and --json" in one_sentence(err)


def test_a_plan_is_another_question(write: Write, run: Run) -> None:
    code, _, err = run(write(), "--quick", "--plan")
    assert code == 2
    assert "not allowed with argument" in one_sentence(err)
