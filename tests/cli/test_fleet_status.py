"""`autoprec fleet status` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from factories import profile_of

from autoprec.cli import main
from autoprec.core.device.facts import Fingerprint
from autoprec.core.device.observation import DeviceKind
from autoprec.core.recipe import Recipe
from autoprec.profiles import save_profile

Run = Callable[..., tuple[int, str, str]]
ZEN4 = Fingerprint(DeviceKind.CPU, "amd-zen4", "AMD EPYC 9R14", 64)
A100 = Fingerprint(DeviceKind.CUDA, "nvidia-a100", "NVIDIA A100-SXM4-40GB", 40)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def status(*words: object) -> tuple[int, str, str]:
        code = main(["fleet", "status", *(str(word) for word in words)])
        out, err = capsys.readouterr()
        return code, out, err

    return status


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model.profiles"
    for name, fingerprint, version in (("zen4", ZEN4, "1.1"), ("a100", A100, "1.2")):
        made = profile_of(Recipe(batch_size=48), "simulated", fingerprint, simulated=version)
        save_profile(replace(made, created="2026-01-02T00:00:00Z"), place / f"{name}.profile.yaml")
    return place


def test_the_table_has_a_row_for_each_type_and_names_what_to_verify(folder: Path, run: Run) -> None:
    code, out, err = run(folder, "--price", "a100=1.80")
    assert (code, err) == (0, "")
    rows = out.splitlines()
    assert "AMD EPYC 9R14 (amd-zen4)" in rows[2]
    assert "float32, batch 48" in rows[1]
    assert "400000" not in rows[2]
    assert "4e+05" in rows[1]
    assert "1.8" in rows[1]
    assert "versions differ: simulated: 1.2 in a100.profile.yaml; 1.1 in zen4.profile.yaml" in out
    assert (
        "verify zen4.profile.yaml again: made with simulated 1.1, another profile with 1.2" in out
    )
    assert "days old" in out


def test_json_has_the_same(folder: Path, run: Run) -> None:
    code, out, _ = run(folder, "--price", "a100=1.80", "--json")
    assert code == 0
    a100, zen4 = json.loads(out)["types"]
    assert a100["file"] == "a100.profile.yaml"
    assert a100["samples_per_price"] == pytest.approx(200.0 * 3600 / 1.8)
    assert zen4["price_per_hour"] is None
    assert zen4["fingerprint"]["family"] == "amd-zen4"
    assert zen4["verify"]


@pytest.mark.parametrize("price", ["a100", "=2", "a100=", "a100=free", "a100=-1", "a100=nan"])
def test_a_price_is_a_name_and_a_cost(price: str, folder: Path, run: Run) -> None:
    code, out, err = run(folder, f"--price={price}")
    assert (code, out) == (2, "")
    assert f"--price {price!r} given, expected NAME=COST" in err


def test_an_unknown_price_lists_the_known_devices(folder: Path, run: Run) -> None:
    code, _, err = run(folder, "--price", "h100=3")
    assert code == 2
    assert "nvidia-a100 (NVIDIA A100-SXM4-40GB), amd-zen4 (AMD EPYC 9R14)" in err


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_folder_without_profiles_is_a_usage_error(name: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / "empty").mkdir()
    code, _, err = run(tmp_path / name)
    assert code == 2
    assert str(tmp_path / name) in err


def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["fleet", "status", "--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0
    assert "examples:" in said
    assert "exit codes: 0 ok" in said
