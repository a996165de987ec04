"""What each setting of an LSTM's profile brings, in fresh processes and in alternation.

    python -m benchmarks.ablations.lstm_settings [--rounds 6] [--seconds 4]

An LSTM language model is tuned. Then its profile trains in a process of its own, beside the same
recipe written by hand and beside variants in which one thing differs: twice the batch; freed memory
kept by the environment from the process's start, by mallopt after the import (as the profile does),
or not at all; float32 products rounded by oneDNN (`implicit_bfloat16`) or not; float32. Printed is
each one's throughput over the profile's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoprec.api import tune
from autoprec.core.codec import to_plain
from autoprec.core.dtypes import Policy
from autoprec.core.profile import Profile
from autoprec.core.recipe import KEEP_MEMORY, Recipe
from autoprec.core.speed.noise import paired_ratio
from autoprec.profiles import load_profile, save_profile
from autoprec.yaml_files import write_text
from benchmarks.checkout import RESULTS
from benchmarks.peers.searches import KEPT
from benchmarks.profiles.fresh_process import rate
from benchmarks.provenance import machine
from benchmarks.search.oracle_rows import ratio_text

TASK = Path(__file__).with_name("lstm_language_model.py")
IMPLICIT = "implicit_bfloat16"


@dataclass(frozen=True)
class Way:
    """One way to train: by a recipe (None: written by hand in `dtype`) at a batch."""

    name: str
    batch: int
    recipe: Recipe | None = None
    dtype: str = "float32"
    kept_by_environment: bool = False

    @property
    def variables(self) -> Mapping[str, str]:
        """What the process's environment holds from its start."""
        return KEPT if self.kept_by_environment else {}


def ways(chosen: Recipe) -> Iterator[Way]:
    """The profile, and what differs from it in one thing or was written by hand."""
    batch = chosen.batch_size
    knobs = dict(chosen.knobs)
    yield Way("the profile", batch, chosen)
    yield from _settings("the profile", chosen)
    if not chosen.policy.mixed:
        bfloat16 = chosen.with_policy(Policy.MIXED_BFLOAT16)
        yield Way("mixed_bfloat16 instead", batch, bfloat16)
        yield from _settings("mixed_bfloat16 instead", bfloat16)
    given_back = replace(chosen, knobs={k: v for k, v in knobs.items() if k != KEEP_MEMORY})
    yield Way(
        "the profile, memory kept by the environment", batch, given_back, kept_by_environment=True
    )
    doubled = replace(chosen, batch_size=2 * batch)
    yield Way("the profile at twice the batch", 2 * batch, doubled)
    for dtype in ("bfloat16", "float32"):
        for size in (batch, 2 * batch):
            name = f"by hand, {dtype}, batch {size}"
            yield Way(name, size, dtype=dtype)
            kept = f"{name}, memory kept by the environment"
            yield Way(kept, size, dtype=dtype, kept_by_environment=True)


def _settings(name: str, recipe: Recipe) -> Iterator[Way]:
    """A recipe without each of its knobs, and with those in question that it has not."""
    knobs = dict(recipe.knobs)
    for knob in knobs:
        without = replace(recipe, knobs={k: v for k, v in knobs.items() if k != knob})
        yield Way(f"{name}, without {knob}", recipe.batch_size, without)
    for knob in (KEEP_MEMORY, IMPLICIT):
        if knob not in knobs:
            more = replace(recipe, knobs={**knobs, knob: True})
            yield Way(f"{name}, with {knob}", recipe.batch_size, more)


def measure(found: Sequence[Way], profile: Profile, rounds: int, seconds: float) -> Any:
    """Everybody's rates, a process for each in every round; every second round turns round."""
    rates: list[list[float]] = [[] for _ in found]
    with tempfile.TemporaryDirectory() as folder:
        paths: list[Path | None] = []
        for number, way in enumerate(found):
            path = Path(folder) / f"{number}.yaml" if way.recipe is not None else None
            if path is not None and way.recipe is not None:
                save_profile(replace(profile, recipe=way.recipe), path)
            paths.append(path)
        for turn in range(rounds):
            order = range(len(found)) if turn % 2 == 0 else reversed(range(len(found)))
            for number in order:
                way = found[number]
                rates[number].append(
                    rate(
                        TASK,
                        paths[number],
                        way.batch,
                        seconds,
                        dtype=way.dtype,
                        variables=way.variables,
                    )
                )
            print(f"round {turn + 1} of {rounds}", flush=True)
    return rates


def main(words: Sequence[str] | None = None) -> None:
    """Tune, measure, print and store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    head = machine()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.yaml"
        tune(TASK, device="cpu", output=path, storage=str(Path(folder) / "study.journal"))
        profile = load_profile(path)
    found = list(ways(profile.recipe))
    rates = measure(found, profile, arguments.rounds, arguments.seconds)
    rows = [
        {"way": way.name, "over_profile": to_plain(paired_ratio(own, rates[0])), "rates": own}
        for way, own in zip(found, rates, strict=True)
    ]
    for row in rows:
        print(f"{row['way']:60s} {ratio_text(row['over_profile'], 3)}")
    result = {
        **head,
        "rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "recipe": to_plain(profile.recipe),
        "claimed": to_plain(profile.evidence.over_baseline),
        "rows": rows,
    }
    output = arguments.output or RESULTS / f"ablation-{head['date']}-{head['family']}.json"
    write_text(output, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
