"""`autoprec check` on the command line: does a profile fit here, and if not, why not?"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from autoprec import api, measurement_cache, probing
from autoprec.cli import main
from autoprec.core.device.measurements import Measurements, Product
from autoprec.core.device.probe_result import FrameworkFact
from autoprec.core.dtypes import DType
from autoprec.core.recipe import Recipe
from autoprec.errors import ProfileError
from autoprec.hardware.catalogue import profiles_folder
from autoprec.hardware.probes.observe import observe
from autoprec.profiles import load_profile
from benchmarks.recordings.machine_replay import RecordedMachine, read_recording

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


def test_what_was_refused_is_told_with_its_reason(profile: Path, run: Run) -> None:
    refused = {"candidate": "float8", "reason": "float8 is absent on this device"}
    change(profile, evidence__refusals=[refused])
    code, out, _ = run(profile)
    assert code == 0
    assert out.splitlines()[1:] == ["  float8 refused: float8 is absent on this device"]


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


@pytest.mark.parametrize("name", ["model.py", "notes.md", "README"])
def test_a_file_that_is_no_profile_is_not_taken_for_one_of_another_version(
    run: Run, tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    path.write_text("import torch\n\n[project]\n`a`: b\n")
    code, out, err = run(path)
    assert (code, out) == (2, "")
    assert err.startswith(f"autoprec: {path} is no profile: expected a file that `autoprec tune`")
    assert (f"`autoprec tune {path}` writes" in err) == (name == "model.py")
    path.with_suffix(".yaml").write_text("families: {}\n")
    err = run(path.with_suffix(".yaml"))[2]
    assert "is no profile: it has no recipe" in err
    assert "install the version that wrote it" not in err


def test_a_profile_of_another_version_is_said_so(profile: Path, run: Run) -> None:
    change(profile, schema=4)
    assert "install the version that wrote it" in run(profile)[2]


SOFTWARE = {
    "TensorFlow alone": ({"tensorflow": "2.21.0", "keras": "3.15.1"}, 4),
    "both": ({"torch": "2.13.0", "tensorflow": "2.21.0", "keras": "3.15.1"}, 0),
}


@pytest.mark.parametrize(("installed", "expected"), SOFTWARE.values(), ids=SOFTWARE)
def test_a_profile_of_a_framework_that_is_not_installed_does_not_fit(
    profile: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    installed: dict[str, str],
    expected: int,
) -> None:
    frameworks = tuple(FrameworkFact(*each) for each in installed.items())
    seen = replace(probing.observe(), frameworks=frameworks)
    monkeypatch.setattr(probing, "observe", lambda **_: seen)
    change(profile, task__framework="torch", software={"torch": "2.13.0"})
    code, _, err = run(profile)
    assert code == expected
    assert ("made with torch 2.13.0, which is not installed here" in err) == bool(expected)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Have both frameworks on another CPU, on which some have timed bfloat16, so fast."""
    recorded = profiles_folder() / "recordings" / "intel-sapphire-rapids.json"
    versions = {"torch": "2.13.0", "tensorflow": "2.21.0", "keras": "3.15.1"}
    frameworks = tuple(FrameworkFact(*each) for each in versions.items())
    seen = observe(RecordedMachine(read_recording(recorded)))
    seen = replace(seen, frameworks=frameworks)
    monkeypatch.setattr(probing, "observe", lambda **_: seen)
    monkeypatch.setenv(measurement_cache.FOLDER_VARIABLE, str(tmp_path / "cache"))

    def remember(**ratios: float) -> None:
        here = api.device_fingerprint()
        for name, ratio in ratios.items():
            rates = {DType.FLOAT32: 100.0, DType.BFLOAT16: 100.0 * ratio}
            products = tuple(Product(dtype, gflops=rate) for dtype, rate in rates.items())
            known = Measurements(name, products)
            measurement_cache.remember(
                measurement_cache.TimedDevice(here, name, versions[name], known)
            )

    return remember


@pytest.mark.parametrize(
    ("ratios", "framework", "policy"),
    [
        ({}, "torch", "float32"),
        ({"torch": 3.0}, "torch", "mixed_bfloat16"),
        ({"torch": 3.0, "tensorflow": 0.5}, "keras", "float32"),
        ({"torch": 0.5, "tensorflow": 3.0}, "keras", "mixed_bfloat16"),
        ({"torch": 3.0}, "keras", "mixed_bfloat16"),
    ],
)
def test_what_does_not_fit_is_told_with_what_is_done_instead(
    profile: Path,
    run: Run,
    timed: Callable[..., None],
    ratios: dict[str, float],
    framework: str,
    policy: str,
) -> None:
    """By the catalogue bfloat16 would be native here; only a measurement makes it the fallback."""
    timed(**ratios)
    used = {"torch": "2.13.0"} if framework == "torch" else {"tensorflow": "2.21.0"}
    family = "ibm-power10"
    change(profile, task__framework=framework, software=used, device__fingerprint__family=family)
    code, _, err = run(profile)
    assert code == 4
    assert "Run `autoprec tune model.py` here" in err
    assert f"until then apply_profile would train in {policy}: " in err
    assert f"train in {policy}" in json.loads(run(profile, "--json")[1])["instead"]


def test_what_a_rehearsal_made_is_not_applied_at_all(profile: Path, run: Run) -> None:
    change(profile, device__fingerprint__rehearsal=True)
    code, _, err = run(profile)
    assert code == 4
    assert "made in a rehearsal" in err
    assert "until then apply_profile refuses it" in err


def test_a_truncated_profile_is_said_so(profile: Path, run: Run) -> None:
    text = profile.read_text()
    for share in (0.3, 0.6, 0.9):
        profile.write_text(text[: int(share * len(text))])
        assert run(profile)[0] == 2


def test_a_missing_file_and_a_folder(run: Run, tmp_path: Path) -> None:
    assert run(tmp_path / "none.yaml")[0] == 2
    assert "folder" in run(tmp_path)[2]


def test_an_inconclusive_profile_fits_and_says_so(profile: Path, run: Run) -> None:
    change(profile, evidence__inconclusive="it ran at two paces")
    code, out, err = run(profile)
    assert code == 0
    said = "fits, but its tuning was inconclusive: float32 at batch 48, because it ran at two paces"
    assert out == f"{profile} {said}\n"
    assert "Tune again on an idle machine" in err
    code, out, _ = run(profile, "--json")
    assert json.loads(out)["inconclusive"] == "it ran at two paces"


def test_a_task_in_the_place_of_its_profile_is_told_where_that_is(tmp_path: Path) -> None:
    task = tmp_path / "train.py"
    task.write_text("def build_model(:")
    own = tmp_path / "train.profile.yaml"
    with pytest.raises(ProfileError, match=re.escape(f"`autoprec tune {task}` writes {own}")):
        load_profile(task)
    own.touch()
    with pytest.raises(ProfileError, match=re.escape(f"train.py's is {own}")):
        load_profile(task)
