"""A profile in the runs of experiment trackers, read back from what they wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoprec import log_to
from autoprec.core.numerics.watching import WatchedStep
from autoprec.errors import UsageError
from autoprec.profiles import load_profile, save_profile
from autoprec.tracking import scalars_of, series_of
from tests.reporting.page.test_page import won

pytestmark = pytest.mark.integrations

PROFILE = won()
NAMES = {
    *("batch_size", "initial_loss_scale", "samples_per_second", "baseline_samples_per_second"),
    *("step_seconds", "peak_memory_bytes", "peak_share", "trials", "tuning_seconds"),
    *("speedup", "speedup_low", "speedup_high"),
}
WATCHED = (
    WatchedStep(1, 8, 8, 0.01, -0.002, 0.03, 0.0),
    WatchedStep(5, not_checked="there is not enough memory for a second pass"),
    WatchedStep(9, 8, 8, 0.5, None, 0.9, 0.1, "its outputs are 50 % away", ("a",), "warn"),
)


def test_checks_during_training_are_logged_by_their_updates() -> None:
    first, unchecked, last = series_of(WATCHED)
    assert first == (1, watch(fault=0.0, outputs=0.01, loss=-0.002, gradient=0.03, vanished=0.0))
    assert unchecked == (5, {})
    assert last == (9, watch(fault=1.0, outputs=0.5, gradient=0.9, vanished=0.1))


def test_a_writer_gets_each_number_at_its_update(tmp_path: Path) -> None:
    class Writer:
        """Does what of a SummaryWriter is used."""

        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.scalars.append((name, value, step))

        def add_text(self, name: str, value: str, step: int) -> None:
            pass

        def get_logdir(self) -> str:
            return str(tmp_path)

        def flush(self) -> None:
            pass

    writer = Writer()
    log_to(writer, PROFILE, watched=WATCHED)
    found = [each for each in writer.scalars if each[0] == "autoprec/watch/outputs"]
    assert found == [("autoprec/watch/outputs", 0.01, 1), ("autoprec/watch/outputs", 0.5, 9)]
    (page,) = tmp_path.glob("*.report.html")
    assert "its outputs are 50 % away; warn" in page.read_text(encoding="utf-8")


def watch(**numbers: float) -> dict[str, float]:
    return {f"autoprec/watch/{name}": value for name, value in numbers.items()}


def test_the_numbers_are_the_profiles() -> None:
    scalars = scalars_of(PROFILE)
    assert {f"autoprec/{name}" for name in NAMES} <= scalars.keys()
    assert scalars["autoprec/speedup"] == PROFILE.evidence.speedup.ratio
    assert scalars["autoprec/initial_loss_scale"] == 1024.0
    assert scalars["autoprec/batch_size"] == 64.0


@pytest.mark.filterwarnings("default")  # wandb's own
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    logged: list[tuple[str, str, list[str]]] = []
    with wandb.init(mode="offline", project="p", dir=str(tmp_path)) as run:
        log_artifact = run.log_artifact

        def heard(artifact: wandb.Artifact) -> object:
            logged.append((artifact.name, artifact.type, sorted(artifact.manifest.entries)))
            return log_artifact(artifact)

        monkeypatch.setattr(run, "log_artifact", heard)
        log_to(run, PROFILE, watched=WATCHED)
        summary = dict(run.summary)
        folder = Path(run.dir)
    stem = Path(PROFILE.task.file).stem
    files = [f"{stem}.profile.yaml", f"{stem}.report.html"]
    assert logged == [(f"{stem}-autoprec", "autoprec-profile", files)]
    assert {name: summary[name] for name in scalars_of(PROFILE)} == scalars_of(PROFILE)
    assert summary["autoprec/policy"] == "mixed_float16"
    assert (summary["autoprec/watch/updates"], summary["autoprec/watch/outputs"]) == (9, 0.5)
    (page,) = folder.rglob("*.html")
    assert "mixed_float16" in page.read_text(encoding="utf-8")
    assert "its outputs are 50 % away; warn" in page.read_text(encoding="utf-8")


@pytest.mark.filterwarnings("default")  # mlflow's own
def test_mlflow(tmp_path: Path) -> None:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    mlflow.create_experiment("e", artifact_location=(tmp_path / "artifacts").as_uri())
    mlflow.set_experiment("e")
    with mlflow.start_run() as run:
        log_to(run, PROFILE, watched=WATCHED)
    client = mlflow.MlflowClient()
    read = client.get_run(run.info.run_id).data
    logged = {k: v for k, v in read.metrics.items() if not k.startswith("autoprec/watch/")}
    assert logged == pytest.approx(scalars_of(PROFILE))
    found = client.get_metric_history(run.info.run_id, "autoprec/watch/outputs")
    assert [(each.step, each.value) for each in found] == [(1, 0.01), (9, 0.5)]
    assert read.tags["autoprec/policy"] == "mixed_float16"
    assert read.tags["autoprec/verdict"] == PROFILE.evidence.parity.verdict
    (file,) = (tmp_path / "artifacts").rglob("*.profile.yaml")
    assert load_profile(file) == PROFILE
    assert len(list((tmp_path / "artifacts").rglob("*.report.html"))) == 1


def test_a_profiles_file_is_read_before_anything_is_logged(tmp_path: Path) -> None:
    from autoprec.errors import ProfileError

    file = tmp_path / "m.profile.yaml"
    save_profile(PROFILE, file)
    with pytest.raises(UsageError, match=r"`run` of type builtins\.dict given, expected a wandb"):
        log_to({}, file)

    class Run:
        """Says that it is MLflow's."""

        __module__ = "mlflow.entities.run"
        info = None

    file.write_text(json.dumps({"recipe": {}}))
    with pytest.raises(ProfileError, match="no schema given"):
        log_to(Run(), file)
