"""Loads the zoos' tasks beside tests that load other tasks of the same names, and judges them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from autoprec.backends.protocol import Task
from autoprec.core.numerics.proof_steps import PROOF_LENGTHS
from autoprec.core.numerics.verdict import Verdict
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.workers.task_file import load_task
from benchmarks.numerics.judge import at_tuned_scale, tracer
from benchmarks.numerics.labels import POLICIES

#: What a proof takes where a step takes milliseconds, on a busy machine too.
STEPS = PROOF_LENGTHS[-1]


@cache
def loaded(path: Path) -> Task:
    """The task; what another file's tests have loaded under its name is left to them."""
    before = sys.modules.pop(path.stem, None)
    try:
        return load_task(path)
    finally:
        sys.modules.pop(path.stem, None)
        if before is not None:
            sys.modules[path.stem] = before


def verdicts(
    path: Path, policies: Iterable[str], *, framework: str, seed: int
) -> dict[str, Verdict]:
    """What the tuner decides of a task under each policy, by one proof as in a tuning.

    float16 is first: its loss scale is chosen along a float32 run that no other policy lengthened.
    """
    proof = Proof(tracer(loaded(path), seed, framework=framework), steps=STEPS)
    return {
        policy: proof.prove(at_tuned_scale(proof, POLICIES[policy]))
        for policy in sorted(policies, reverse=True)
    }
