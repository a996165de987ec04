"""What a user installs: the wheel, into an empty environment, with neither framework."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.code_blocks import ROOT, block, commands_in
from tests.processes import SITE

CONSTRAINTS = ROOT / "constraints.txt"
SCRIPTS = "Scripts" if os.name == "nt" else "bin"
PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax"}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command far from the repository's own packages; return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    child = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0, f"{command}\n{child.stdout}\n{child.stderr}"
    return child.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from the sdist, as for a release."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel without extras into a new virtual environment."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    python = folder / SCRIPTS / "python"
    run(python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, wheel, cwd=folder)
    return folder


@pytest.mark.slow
@pytest.mark.release
def test_the_wheel_holds_the_package_its_data_and_nothing_else(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"autoprec"}
    assert "autoprec/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "autoprec/_profiles/profile.schema.json" in names
    only_for_tests = re.compile(r"/(tests?|test_\w+|conftest|benchmarks|simulated|recordings)[/.]")
    assert not [name for name in names if only_for_tests.search(name)]
    code = [name for name in names if name.endswith(".py")]
    assert not [name for name in code if b"simulated" in archive.read(name)]
    for data in (ROOT / "profiles").rglob("*.yaml"):
        assert f"autoprec/_profiles/{data.relative_to(ROOT / 'profiles').as_posix()}" in names


@pytest.mark.slow
@pytest.mark.release
def test_the_installed_probe_finds_its_data(environment: Path) -> None:
    script = environment / SCRIPTS / "autoprec"
    probed = json.loads(run(script, "probe", "--json", cwd=environment))
    assert probed["devices"]
    assert probed["frameworks"] == []
    question = (
        "from autoprec.hardware.catalogue import load_catalogue, profiles_folder;"
        "print(profiles_folder()); print(len(load_catalogue().names))"
    )
    printed = run(environment / SCRIPTS / "python", "-c", question, cwd=environment)
    folder, families = printed.split()
    assert Path(folder).is_relative_to(environment.resolve())
    assert int(families) >= 40


TASK = """
from simulated import SimulatedModel

BATCH_SIZE = 32

def build_model():
    return SimulatedModel(per_sample={"float32": 0.0005, "mixed_bfloat16": 0.0002})

def build_data(batch_size):
    return []
"""


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.skipif(os.name != "posix", reason="workers need POSIX")
def test_every_command_works_where_there_is_no_checkout(environment: Path, tmp_path: Path) -> None:
    """The simulated model stands in for a framework, installed there as another distribution."""
    packages = run(environment / SCRIPTS / "python", "-c", PURELIB, cwd=tmp_path).strip()
    shutil.copytree(ROOT / "tests" / "frameworks", packages, dirs_exist_ok=True)
    shutil.copy(SITE / "sitecustomize.py", packages)  # no tuning waits for other processes

    def autoprec(*words: str) -> str:
        return run(environment / SCRIPTS / "autoprec", *words, cwd=tmp_path)

    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "model.py").write_text(TASK)
    assert "float16" in autoprec("probe", "--device", "h100")
    policies = ("--policies", "float32,mixed_bfloat16")
    autoprec("tune", "task/model.py", *policies, "--rounds", "2", "--report", "--wait")
    assert (tmp_path / "task" / "model.report.html").is_file()
    profile = "task/model.profile.yaml"
    assert autoprec("show", profile).startswith("model.py: mixed_bfloat16")
    assert autoprec("report", profile, "-o", "r.html") == "r.html\n"
    assert autoprec("diff", profile, profile) == "the same recipe\n"
    assert "fits" in autoprec("check", profile)
    assert autoprec("verify", profile, "--wait").endswith("every claim holds\n")
    assert json.loads(autoprec("schema"))["title"] == "autoprec profile"


@pytest.mark.slow
@pytest.mark.release
def test_installing_pulls_no_framework(environment: Path) -> None:
    python = environment / SCRIPTS / "python"
    listed = json.loads(run(python, "-m", "pip", "list", "--format=json", cwd=environment))
    names = {package["name"].lower() for package in listed}
    assert "autoprec" in names
    assert names.isdisjoint(FRAMEWORKS)


@pytest.mark.slow
@pytest.mark.release
@pytest.mark.skipif(os.name != "posix", reason="the command is one of a POSIX shell")
def test_a_checkout_is_installed_as_the_readme_says(tmp_path: Path) -> None:
    """In a copy of the repository; what it needs is found among the packages of these tests."""
    (command,) = commands_in(block("README.md", 0))
    copy, programs = tmp_path / "copy", tmp_path / "environment" / SCRIPTS
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "autoprec", "profiles"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)
    run(sys.executable, "-m", "venv", programs.parent, cwd=copy)
    packages = Path(run(programs / "python", "-c", PURELIB, cwd=copy).strip())
    (packages / "known.pth").write_text(sysconfig.get_path("purelib"))
    said = run("bash", "-c", f"exec 2>&1; export PATH={programs}:$PATH; {command}", cwd=copy)
    assert "does not provide the extra" not in said
    question = "import autoprec; print(autoprec.__file__)"
    found = run(programs / "python", "-c", question, cwd=tmp_path)
    assert Path(found.strip()) == copy / "autoprec" / "__init__.py"
    probed = json.loads(run(programs / "autoprec", "probe", "--json", cwd=tmp_path))
    assert "torch" in {each["name"] for each in probed["frameworks"]}


def test_the_constraints_pin_exactly_and_name_no_place() -> None:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    for line in lines:
        name, version = line.split("==")
        assert name
        assert not set(version) & set("+@/ ;"), f"{line}: a local version or a place"


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [each for group in (project["dependencies"], *extras) for each in group]
    names = {each.split(">")[0].split("<")[0].split("=")[0].strip().lower() for each in wanted}
    lines = CONSTRAINTS.read_text().lower().splitlines()
    assert names <= {line.split("==")[0] for line in lines if "==" in line}
