"""Logs profiles to experiment trackers: Weights & Biases, MLflow and TensorBoard.

None of them is imported: the run that the caller passes says which it is, and does the work.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprec.core.numerics.watching import WatchedStep
from autoprec.core.profile import Profile
from autoprec.errors import UsageError
from autoprec.profiles import REPORT_SUFFIX, SUFFIX, dump_profile, load_profile
from autoprec.reports import report
from autoprec.yaml_files import write_text

#: Numbers by name, each set at an update of the training.
Series = Sequence[tuple[int, Mapping[str, float]]]

_EXPECTED = (
    "expected a wandb run (wandb.init()), an MLflow run (mlflow.start_run()), or TensorBoard's "
    "SummaryWriter (torch.utils.tensorboard) or tf.summary.create_file_writer(...)"
)


def log_to(run: Any, profile: str | Path | Profile, *, watched: Sequence[WatchedStep] = ()) -> None:
    """Log a profile, its report and its main numbers to a run of an experiment tracker.

    `run` is the caller's own: a wandb run, an MLflow run (whose tracking URI must be the current
    one), or a TensorBoard writer. Names begin with "autoprec/", and a number that the profile does
    not have is not logged. At the end of a training, `watched=precision.watched` logs the checks
    during training as well: "autoprec/watch/outputs" and so on, each at its update, and what was
    found in the report. Nothing is closed or finished. Raises `UsageError` for another `run`,
    `ProfileError` for a file that is no profile.
    """
    log = _logger_of(run)
    known = profile if isinstance(profile, Profile) else load_profile(profile)
    with tempfile.TemporaryDirectory(prefix="autoprec-") as folder:
        stem = Path(known.task.file).stem
        files = Path(folder, stem + SUFFIX), Path(folder, stem + REPORT_SUFFIX)
        write_text(files[0], dump_profile(known))
        report(known, output=files[1], watched=watched)
        log(run, known, *files, series_of(watched))


def scalars_of(profile: Profile) -> dict[str, float]:
    """Return a profile's main numbers by name.

    "speedup" is a ratio to float32 at the recipe's batch, "throughput" to the samples per second of
    the baseline's, each with the ends of its 95 % interval; times are in seconds, memory in bytes,
    rates in samples per second.
    """
    recipe, evidence = profile.recipe, profile.evidence
    scale = recipe.loss_scale
    numbers: dict[str, float | None] = {
        "batch_size": recipe.batch_size,
        "initial_loss_scale": None if scale is None else scale.initial,
        "samples_per_second": evidence.chosen.samples_per_second,
        "baseline_samples_per_second": evidence.baseline.samples_per_second,
        "step_seconds": evidence.chosen.step_seconds,
        "peak_memory_bytes": evidence.chosen.peak_memory_bytes,
        "peak_share": evidence.chosen.peak_share,
        "trials": evidence.trials,
        "tuning_seconds": evidence.tuning_seconds,
    }
    for name, ratio in (("speedup", evidence.speedup), ("throughput", evidence.throughput)):
        if ratio is not None and ratio.rounds:
            numbers |= {name: ratio.ratio, f"{name}_low": ratio.low, f"{name}_high": ratio.high}
    return {
        f"autoprec/{name}": float(value) for name, value in numbers.items() if value is not None
    }


def series_of(watched: Sequence[WatchedStep]) -> Series:
    """Return what each check during training found by its update: shares, and 1 for a fault."""
    return [
        (each.updates, {f"autoprec/watch/{name}": value for name, value in _known(each)})
        for each in watched
    ]


def _known(check: WatchedStep) -> list[tuple[str, float]]:
    if not check.samples:
        return []
    numbers = [(name, getattr(check, name)) for name in ("outputs", "loss", "gradient", "vanished")]
    fault = ("fault", float(bool(check.problem)))
    return [fault, *((name, value) for name, value in numbers if value is not None)]


def _words_of(profile: Profile) -> dict[str, str]:
    """Return what of a profile is words, by name, for a tracker's table of runs."""
    return {
        "autoprec/policy": str(profile.recipe.policy),
        "autoprec/verdict": profile.evidence.parity.verdict,
        "autoprec/device": profile.device.name or profile.device.family,
    }


def _log_to_wandb(run: Any, profile: Profile, file: Path, page: Path, checks: Series) -> None:
    wandb = sys.modules["wandb"]
    run.summary.update({**scalars_of(profile), **_words_of(profile)})
    artifact = wandb.Artifact(f"{Path(profile.task.file).stem}-autoprec", type="autoprec-profile")
    artifact.add_file(str(file))
    artifact.add_file(str(page))
    run.log_artifact(artifact)
    run.log({"autoprec/report": wandb.Html(page.read_text(encoding="utf-8"), inject=False)})
    run.define_metric("autoprec/watch/*", step_metric="autoprec/watch/updates")
    for updates, numbers in checks:
        run.log({"autoprec/watch/updates": updates, **numbers})


def _log_to_mlflow(run: Any, profile: Profile, file: Path, page: Path, checks: Series) -> None:
    client, run_id = sys.modules["mlflow"].MlflowClient(), run.info.run_id
    for name, value in scalars_of(profile).items():
        client.log_metric(run_id, name, value)
    for name, word in _words_of(profile).items():
        client.set_tag(run_id, name, word)
    for each in (file, page):
        client.log_artifact(run_id, str(each), "autoprec")
    for updates, numbers in checks:
        for name, value in numbers.items():
            client.log_metric(run_id, name, value, step=updates)


def _log_to_summary_writer(
    run: Any, profile: Profile, file: Path, page: Path, checks: Series
) -> None:
    for name, value in scalars_of(profile).items():
        run.add_scalar(name, value, 0)
    for updates, numbers in checks:
        for name, value in numbers.items():
            run.add_scalar(name, value, updates)
    run.add_text("autoprec/profile", _as_markdown(file), 0)
    # TensorBoard shows no HTML: the report lies beside its log.
    write_text(Path(run.get_logdir(), page.name), page.read_text(encoding="utf-8"))
    run.flush()


def _log_to_summary_ops(run: Any, profile: Profile, file: Path, page: Path, checks: Series) -> None:
    summary = sys.modules[_package(type(run))].summary
    with run.as_default():
        for name, value in scalars_of(profile).items():
            summary.scalar(name, value, step=0)
        for updates, numbers in checks:
            for name, value in numbers.items():
                summary.scalar(name, value, step=updates)
        summary.text("autoprec/profile", _as_markdown(file), step=0)
    run.flush()


def _as_markdown(file: Path) -> str:
    """Return a file as a block of code."""
    return "".join(f"    {line}\n" for line in file.read_text(encoding="utf-8").splitlines())


def _logger_of(run: Any) -> Callable[[Any, Profile, Path, Path, Series], None]:
    """Return how to log to this kind of run, known by its package or by what it can do."""
    packages = {_package(kind) for kind in type(run).__mro__}

    def can(*methods: str) -> bool:
        return all(callable(getattr(run, method, None)) for method in methods)

    if "wandb" in packages and hasattr(run, "log_artifact"):
        return _log_to_wandb
    if "mlflow" in packages and hasattr(run, "info"):
        return _log_to_mlflow
    if can("add_scalar", "add_text", "get_logdir"):
        return _log_to_summary_writer
    if can("as_default", "set_as_default", "flush"):
        return _log_to_summary_ops
    kind = f"{type(run).__module__}.{type(run).__qualname__}"
    raise UsageError(f"`run` of type {kind} given, {_EXPECTED}")


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
