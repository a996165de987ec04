"""A finished tuning in optuna-dashboard: its server names the recipe that was chosen."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from autoprec.profiles import load_profile
from autoprec.tuning.study.storage import open_storage
from autoprec.tuning.study.study import FINAL_SUFFIX
from tests.cli.commands import Run, Write
from tests.cli.conftest import run, write

__all__ = ["run", "write"]

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="workers need POSIX"),
    pytest.mark.usefixtures("unmeasured", "in_process"),
]


def get(app: Any, path: str) -> Any:
    """Ask the dashboard's server for an address; return what it answers."""
    answer: list[str] = []
    environment = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": path,
        "SERVER_NAME": "here",
        "SERVER_PORT": "80",
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(),
        "wsgi.errors": io.StringIO(),
    }
    body = b"".join(app(environment, lambda status, headers, *_: answer.append(status)))
    assert answer[0].startswith("200"), (answer, body)
    return json.loads(body)


@pytest.mark.parametrize("fields", [{}, {"broken": ("mixed_bfloat16",)}], ids=["gain", "broken"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_server_names_our_choice(
    fields: dict[str, Any], write: Write, run: Run, tmp_path: Path
) -> None:
    from optuna_dashboard import wsgi  # imports scikit-learn, which takes seconds

    words = ("--policies", "mixed_bfloat16,float32", "--batch-sizes", "32,64")
    assert run(write(**fields), *words)[0] == 0
    profile = load_profile(tmp_path / "model_x.profile.yaml")
    app = wsgi(open_storage(tmp_path / "model_x.study.journal"))
    studies = get(app, "/api/studies")["study_summaries"]
    (number,) = [s["study_id"] for s in studies if s["study_name"].endswith(FINAL_SUFFIX)]
    (best,) = get(app, f"/api/studies/{number}")["best_trials"]
    named = {each["name"]: each["param_external_value"] for each in best["params"]}
    assert named["policy"] == profile.recipe.policy.value
    assert named["batch_size"] == str(profile.recipe.batch_size)
    attributes = {each["key"]: each["value"].strip(chr(34)) for each in best["user_attrs"]}
    assert attributes["fate"] == "chosen"
    assert attributes["batch_size"] == str(profile.recipe.batch_size)


def test_what_cannot_be_chosen_has_the_worst_value_and_says_why(
    write: Write, run: Run, tmp_path: Path
) -> None:
    words = ("--policies", "mixed_bfloat16,float32", "--batch-sizes", "32,64")
    assert run(write(broken=("mixed_bfloat16",)), *words)[0] == 0
    storage = open_storage(tmp_path / "model_x.study.journal")
    (final,) = [s for s in storage.get_all_studies() if s.study_name.endswith(FINAL_SUFFIX)]
    trials = storage.get_all_trials(final._study_id)
    failed = [each for each in trials if each.params["policy"] == "mixed_bfloat16"]
    assert failed
    for each in failed:
        assert each.value == 0.0
        assert each.user_attrs["fate"] == "infeasible"
        assert each.user_attrs["reason"]
