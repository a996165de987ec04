"""What a release uploads and the workflow that docs/verify.md proposes, as their readers check."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integrations

ROOT = Path(__file__).parent.parent.parent


def run(*command: str | Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_twine_accepts_the_wheel_and_the_sdist(tmp_path: Path) -> None:
    run("build", "--outdir", tmp_path, ROOT)
    built = sorted(tmp_path.iterdir())
    assert [file.name.endswith((".whl", ".tar.gz")) for file in built] == [True, True]
    assert run("twine", "check", "--strict", *built).count("PASSED") == 2


def test_the_workflow_is_one_that_github_takes(tmp_path: Path) -> None:
    (workflow,) = re.findall(
        r"```yaml\n(name: .*?)```", (ROOT / "docs/verify.md").read_text(), re.S
    )
    file = tmp_path / "workflow.yml"
    file.write_text(workflow)
    check = ("check_jsonschema", "--builtin-schema", "vendor.github-workflows")
    run(*check, file)
    file.write_text(workflow.replace("runs-on:", "runs-at:"))
    with pytest.raises(AssertionError, match="runs-at"):
        run(*check, file)


def test_the_schema_that_is_shipped_accepts_a_profile_by_another_validator(tmp_path: Path) -> None:
    from autoprec.profiles import save_profile
    from tests.reporting.page.test_page import won

    file = tmp_path / "model.profile.yaml"
    save_profile(won(), file)
    schema = ROOT / "profiles" / "profile.schema.json"
    run("check_jsonschema", "--schemafile", schema, file)
    file.write_text(file.read_text().replace("mixed_float16", "mixed_float61"))
    with pytest.raises(AssertionError, match="mixed_float61"):
        run("check_jsonschema", "--schemafile", schema, file)
