"""`autoprec check` on the command line: does a profile fit here, and if not, why not?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from autoprec.cli import main
from autoprec.core.recipe import Recipe

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def check(*words: object) -> tuple[int, str, str]:
        code = main(["check", *(str(word) for word in words)])
        out, err = capsys.readouterr()
        return code, out, err

    return check


@pytest.fixture
def profile(write_profile: Callable[[Recipe, str], Path]) -> Path:
    return write_profile(Recipe(batch_size=48), "simulated")


def change(path: Path, **fields: object) -> Path:
    document = yaml.safe_load(path.read_text())
    for name, value in fields.items():
        place = document
        *outer, last = name.split("__")
        for each in outer:
            place = place[each]
        place[last] = value
    path.write_text(yaml.safe_dump(document))
    return path


def test_a_profile_of_this_machine_fits(profile: Path, run: Run) -> None:
    code, out, _ = run(profile)
    assert code == 0
    assert out == f"{profile} fits: float32 at batch 48\n"


def test_json_is_json(profile: Path, run: Run) -> None:
    code, out, _ = run(profile, "--json")
    assert code == 0
    assert json.loads(out)["matches"] is True


def test_another_device_does_not_fit(profile: Path, run: Run) -> None:
    change(profile, device__fingerprint__family="ibm-power10", device__family="ibm-power10")
    code, out, err = run(profile)
    assert (code, out) == (4, "")
    assert "does not fit" in err
    assert "autoprec tune" in err
    code, out, _ = run(profile, "--json")
    assert code == 4
    assert json.loads(out)["matches"] is False
    assert json.loads(out)["problems"]


WRONG = {
    "empty": "",
    "no mapping": "- 1\n",
    "no yaml": "a: [1\n",
    "another schema": "schema: 99\n",
    "no schema": "a: 1\n",
    "tags": "schema: !!python/object/apply:os.system ['true']\n",
    "aliases": "a: &x 1\nb: *x\n",
    "a key twice": "schema: 1\nschema: 1\n",
    "zeros": "\0\0\0",
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_what_is_no_profile_is_said_in_one_sentence(text: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    code, out, err = run(path)
    assert (code, out) == (2, "")
    assert err.startswith(f"autoprec: {path}")
    assert err.count("\n") == 1


def test_a_truncated_profile_is_said_so(profile: Path, run: Run) -> None:
    text = profile.read_text()
    for share in (0.3, 0.6, 0.9):
        profile.write_text(text[: int(share * len(text))])
        assert run(profile)[0] == 2


def test_a_missing_file_and_a_folder(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path / "none.yaml")[0] == 2
    assert "folder" in run(tmp_path)[2]
