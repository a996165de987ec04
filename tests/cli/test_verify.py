"""`autoprec verify` on the command line, with a simulated model whose speed and numerics change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from autoprec.cli import main
from tests.cli.commands import QUICK, Run, Write

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="workers need POSIX"),
    pytest.mark.usefixtures("unmeasured", "in_process"),
]

SLOWER = {
    "overhead": {"float32": 0.004, "mixed_bfloat16": 0.008},
    "per_sample": {"float32": 0.0005, "mixed_bfloat16": 0.00029},
}


@pytest.fixture
def tuned(write: Write, run: Run, tmp_path: Path) -> Path:
    code, _, err = run(write(), *QUICK)
    assert code == 0, err
    return tmp_path / "model_x.profile.yaml"


@pytest.fixture
def verify(capfd: pytest.CaptureFixture[str]) -> Run:
    def command(*words: object) -> tuple[int, str, str]:
        code = main(["verify", *(str(word) for word in words)])
        out, err = capfd.readouterr()
        return code, out, err

    return command


def change(profile: Path, ratio: str, edit: Callable[[dict[str, object]], None]) -> None:
    document = yaml.safe_load(profile.read_text())
    edit(document["evidence"][ratio])
    profile.write_text(yaml.safe_dump(document))


def test_an_honest_profile_holds_and_nothing_is_written(
    tuned: Path, verify: Run, tmp_path: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.is_file()}
    for _ in range(3):
        code, out, err = verify(tuned)
        assert code == 0, out
        assert out.endswith("every claim holds\n")
        assert "speed-up: holds: " in out
        assert "numerics: holds: equal was stated, found: equal: " in out
        assert "warning" not in err
    after = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir() if path.is_file()}
    assert after == before


@pytest.mark.parametrize(
    ("ratio", "claim"), [("speedup", "speed-up"), ("throughput", "throughput")]
)
@pytest.mark.parametrize("fields", [("ratio",), ("ratio", "low", "high")])
def test_a_ratio_doubled_by_hand_fails(
    tuned: Path, verify: Run, fields: tuple[str, ...], ratio: str, claim: str
) -> None:
    def double(speedup: dict[str, object]) -> None:
        for name in fields:
            speedup[name] = 2.0 * float(str(speedup[name]))

    change(tuned, ratio, double)
    code, out, _ = verify(tuned)
    assert code == 5
    assert f"{claim}: fails: " in out
    assert out.count("fails: ") == 1 + out.count(f"claim of {claim} fails: ")
    assert "numerics: holds" in out
    assert out.endswith(f"the profile's claim of {claim} fails: tune again on this machine\n")


def test_a_recipe_that_became_three_tenths_slower_fails(
    tuned: Path, write: Write, verify: Run
) -> None:
    write(**SLOWER)
    code, out, err = verify(tuned)
    assert code == 5
    assert "speed-up: fails: " in out
    assert "warning: model_x.py has changed since this profile was made" in err


def test_numerics_that_broke_fail(tuned: Path, write: Write, verify: Run) -> None:
    write(broken=("mixed_bfloat16",))
    code, out, _ = verify(tuned, "--json")
    found = json.loads(out)
    assert code == 5
    assert not found["holds"]
    results = {claim["name"]: claim["result"] for claim in found["claims"]}
    assert results == {
        "runs": "holds",
        "speed-up": "holds",
        "throughput": "holds",
        "numerics": "fails",
    }


def test_a_recipe_that_does_not_run_any_more_fails(tuned: Path, write: Write, verify: Run) -> None:
    write(unsupported=("mixed_bfloat16",))
    code, out, _ = verify(tuned)
    assert code == 5
    assert out.startswith("runs: fails: mixed_bfloat16, batch")


def test_another_task_file_is_given_by_its_path(tuned: Path, verify: Run, tmp_path: Path) -> None:
    elsewhere = tmp_path / "src"
    elsewhere.mkdir()
    (tmp_path / "model_x.py").rename(elsewhere / "model_x.py")
    code, out, err = verify(tuned)
    assert (code, out) == (2, "")
    assert f"there is no model_x.py next to the profile, in {tmp_path}: give the task file" in err
    assert verify(tuned, elsewhere / "model_x.py")[0] == 0


def test_a_profile_of_another_device_is_not_verified(tuned: Path, verify: Run) -> None:
    document = yaml.safe_load(tuned.read_text())
    document["device"]["fingerprint"] |= {"family": "arm-graviton3", "name": "Graviton"}
    tuned.write_text(yaml.safe_dump(document))
    code, out, err = verify(tuned)
    assert (code, out) == (4, "")
    assert "nothing to verify here: made on Graviton (arm-graviton3)" in err


def test_a_path_in_a_profile_is_not_followed(tuned: Path, verify: Run) -> None:
    document = yaml.safe_load(tuned.read_text())
    document["task"]["file"] = "../../etc/passwd.py"
    tuned.write_text(yaml.safe_dump(document))
    code, _, err = verify(tuned)
    assert code == 2
    assert "give the task file" in err
