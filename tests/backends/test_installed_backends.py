"""Backends of other distributions: found by their entry points, and never in anybody's way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import profile_of
from toy import Linear

from autoprec import apply_profile, probe
from autoprec.api import device_fingerprint
from autoprec.backends import registry
from autoprec.core.recipe import Recipe
from autoprec.errors import FrameworkMissing, TaskError
from autoprec.verifying import check_profile
from autoprec.workers.environment import worker_environment

Install = Callable[..., None]

CAPABILITIES = """
from autoprec.backends.protocol import Capabilities

CAPABILITIES = Capabilities(
    title="Other", model="an other.Net", backend_class="OtherBackend", model_modules=("other",),
    {more}
)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install distributions that name a backend each, as pip would leave them in a folder."""
    monkeypatch.syspath_prepend(tmp_path)
    registry._installed.cache_clear()

    def write(distribution: str, name: str = "other", code: str = "", more: str = "") -> None:
        folder = tmp_path / f"{distribution}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        )
        (folder / "entry_points.txt").write_text(f"[autoprec.backends]\n{name} = {distribution}\n")
        package = tmp_path / distribution
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "capabilities.py").write_text(code or CAPABILITIES.format(more=more))

    yield write
    registry._installed.cache_clear()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def model_of(module: str) -> object:
    return type("Net", (), {"__module__": module})()


def forbidden(**_: Any) -> None:
    raise AssertionError("entry points were read")


def test_a_backend_is_known_by_its_name_and_its_models(install: Install) -> None:
    install("other_backend", more="environment={'OTHER_THREADS': '1'},")
    assert registry.capabilities("other").title == "Other"
    assert registry.owner(model_of("other.nets")) == "other"
    assert worker_environment({})["OTHER_THREADS"] == "1"
    with pytest.raises(TaskError, match=r"compiled keras\.Model or an other\.Net"):
        registry.owner(object())
    with pytest.raises(FrameworkMissing, match=r"torch, keras, other"):
        registry.load("jax")


def test_a_framework_that_is_missing_is_named_as_it_is_imported(install: Install) -> None:
    install("other_backend", more="required_modules=('other_framework',),")
    with pytest.raises(FrameworkMissing, match=r"pip install 'other_framework'"):
        registry.load("other")


def test_two_backends_of_one_name_are_neithers(install: Install) -> None:
    install("first_one")
    install("second_one")
    with pytest.raises(FrameworkMissing, match="one each have a backend 'other': uninstall"):
        registry.load("other")
    with pytest.raises(
        TaskError, match=r"given a other\.Net, .*(first_one and second|second_one and first)_one"
    ):
        registry.owner(model_of("other"), "model= was given")
    assert registry.owner(Linear(4)) == "toy"


def test_a_built_in_name_stays_autoprecs(install: Install) -> None:
    install("impostor", "torch")
    assert registry.capabilities("torch").title == "PyTorch"
    assert registry.owner(model_of("torch.nn")) == "torch"
    with pytest.raises(TaskError, match=r"impostor has a backend 'torch'.*: uninstall impostor"):
        registry.owner(model_of("other"))


@pytest.mark.parametrize(
    "code", ["import what_is_not_there", "raise RuntimeError('what_is_not_there')", "X ="]
)
def test_a_backend_that_fails_is_told_by_its_distribution_and_only_to_who_asks(
    install: Install, code: str
) -> None:
    install("broken_one", code=code)
    expected = r"the backend 'other' of broken_one cannot be imported: .*uninstall broken_one"
    with pytest.raises(FrameworkMissing, match=expected):
        registry.capabilities("other")
    with pytest.raises(TaskError, match=expected):
        registry.owner(model_of("other"))
    made = profile_of(Recipe(), "other", device_fingerprint("cpu"), other="1.0")
    assert any("broken_one" in each for each in check_profile(made, device="cpu").problems)
    assert registry.owner(model_of("torch.nn")) == "torch"
    assert registry.owner(model_of("keras.src.models")) == "keras"
    assert registry.owner(Linear(4)) == "toy"
    assert worker_environment({})["TF_CPP_MIN_LOG_LEVEL"]


def test_a_profile_of_another_framework_is_checked_against_its_version() -> None:
    made = profile_of(Recipe(), "toy", device_fingerprint("cpu"), toy="1.0")
    assert check_profile(made, device="cpu").matches
    other = replace(made, software={**made.software, "toy": "0.1"})
    assert any("toy" in each for each in check_profile(other, device="cpu").warnings)


def test_who_uses_a_built_in_framework_pays_for_no_entry_point(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry._installed.cache_clear()
    monkeypatch.setattr("importlib.metadata.entry_points", forbidden)
    assert probe(device="cpu").devices
    assert registry.owner(model_of("torch.nn")) == "torch"
    assert registry.capabilities("keras").title == "Keras"
    with pytest.raises(AssertionError, match="entry points were read"):
        apply_profile(Recipe(), model=Linear(4))
