"""The tables of `autoprec studies`: a row for each study, and the trials of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autoprec.core.codec import to_plain
from autoprec.core.speed.trial_results import Status
from autoprec.reporting import tables
from autoprec.reporting.tables import make_console, table
from autoprec.reporting.tune import trials_table
from autoprec.tuning.study.kept_tunings import KeptStudy, KeptTuning

#: No path is folded if the output is not a terminal.
_WIDTH = 1000


def print_studies(studies: Sequence[KeptStudy]) -> None:
    """Print a row for each study."""
    names = ["task", ">last used", ">tunings", ">trials", ">size", "result"]
    make_console(width=_WIDTH).print(table(names, map(_cells, studies)))


def print_study(study: KeptStudy) -> None:
    """Print the tunings of a study with their trials."""
    console = make_console(width=_WIDTH)
    say = partial(tables.say, console)
    say(study.task or study.place)
    say(f"kept in {study.place} ({_size(study.bytes)})" if study.bytes else study.place)
    for tuning in study.tunings:
        say("")
        say(" - ".join(part for part in (_when(tuning.last_used), tuning.device) if part))
        say(result_text(tuning))
        if tuning.outcomes:
            profile = tuning.profile
            rehearsal = profile is not None and profile.device.fingerprint.rehearsal
            weights = "" if profile is None else profile.evidence.baseline.weights_in
            console.print(trials_table(tuning.outcomes, not rehearsal, weights))
    if not study.tunings:
        say("it holds no tuning")


def plain_study(study: KeptStudy) -> Mapping[str, Any]:
    """Return a study as plain values, for `--json`."""
    return {
        "place": study.place,
        "task": study.task,
        "last_used": None if study.last_used is None else study.last_used.isoformat(),
        "bytes": study.bytes,
        "problem": study.problem,
        "tunings": [
            {
                "name": each.name,
                "device": each.device,
                "finished": each.profile is not None,
                "result": result_text(each),
                "trials": [to_plain(outcome) for outcome in each.outcomes],
            }
            for each in study.tunings
        ],
    }


def result_text(tuning: KeptTuning) -> str:
    """Say what a tuning ended with, or how far it came."""
    profile = tuning.profile
    if profile is not None:
        text = profile.describe_recipe()
        return f"{text}: {profile.describe_gains()}" if profile.gains() else text
    ran = sum(each.status is Status.OK for each in tuning.outcomes)
    return f"not finished: {ran} of {len(tuning.outcomes)} trials ran"


def _cells(study: KeptStudy) -> list[str]:
    if study.problem:
        return [study.place, "", "", "", _size(study.bytes), study.problem]
    trials = sum(len(each.outcomes) for each in study.tunings)
    return [
        study.task or Path(study.place).name,
        _when(study.last_used),
        str(len(study.tunings)),
        str(trials),
        _size(study.bytes),
        result_text(study.tunings[-1]) if study.tunings else "",
    ]


def _size(count: int) -> str:
    return f"{count / 1000:.0f} kB"


def _when(moment: Any) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M}"
