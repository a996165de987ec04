"""The finish: proven finalists against the baseline, then the winner anew against float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autoprec.core.choice import SAME_SPEED, Choice, Finalist, choose
from autoprec.core.recipe import Recipe
from autoprec.core.rules import Refusal
from autoprec.core.statistics import Ratio, paired_ratio
from autoprec.errors import TaskError
from autoprec.tuning.contest import Contest, FinalistFailed
from autoprec.tuning.events import Stage
from autoprec.tuning.evidence import Findings, Proven
from autoprec.tuning.trials import raise_user_error
from autoprec.tuning.work import Work

_FINALISTS = 4
_FEWEST_ROUNDS = 5


def finish(
    work: Work,
    plain: Recipe,
    seconds: float,
    proven: Sequence[Proven],
    findings: Findings,
    substitute: Callable[[Recipe], Proven | None],
) -> None:
    """Choose the recipe; leave the choice and its ratios in `findings`.

    `plain` is the baseline's recipe and `seconds` its step. The choice among several finalists and
    the ratio that the profile reports come from different rounds, so that the winner's luck in the
    first does not flatter it in the second. A finalist that fails now is out, and `substitute` may
    name a proven recipe in its place.
    """
    left = sorted(proven, key=lambda p: -p.rate)
    while True:
        try:
            _finish(work, plain, seconds, left, findings)
        except FinalistFailed as failed:
            raise_user_error(failed.failure)
            if failed.recipe.key() == plain.key():
                raise TaskError(
                    f"the float32 baseline ran before but failed in the finish: {failed}"
                ) from failed
            findings.refusals.append(
                Refusal(
                    failed.recipe.policy.value, f"ran before but failed in the finish: {failed}"
                )
            )
            left = [p for p in left if p.recipe.key() != failed.recipe.key()]
            instead = substitute(failed.recipe)
            if instead is not None and all(p.recipe.key() != instead.recipe.key() for p in left):
                left = sorted([*left, instead], key=lambda p: -p.rate)
        else:
            return


def _finish(
    work: Work, plain: Recipe, seconds: float, left: Sequence[Proven], findings: Findings
) -> None:
    findings.baseline = plain
    others = [p for p in left if p.recipe.key() != plain.key()][:_FINALISTS]
    findings.choice = Choice(plain, Ratio(1.0, 1.0, 1.0, 0), "the baseline is the fastest recipe")
    if not others:
        return
    if len(others) > 1:
        work.listener(Stage("finish", "finalists in alternation"))
        rounds = max(_FEWEST_ROUNDS, work.options.rounds // 2 + 1)
        finals = contest_among(
            work,
            [plain, *(p.recipe for p in others)],
            [seconds, *(p.step_seconds for p in others)],
            rounds,
            findings,
        )
        leader = choose(finals[0], finals[1:], baseline_allowed=False)
        if work.float32_allowed and leader.ratio.high < 1.0:
            findings.choice = _choose(work, finals)
            return
        others = [p for p in others if p.recipe.key() == leader.recipe.key()]
    if others:
        _confirm(work, plain, seconds, others[0], findings)


def _undecided(finals: Sequence[Finalist]) -> bool:
    """Whether the winner seems faster than the baseline, but a few bad rounds may say otherwise."""
    ratio = paired_ratio(finals[1].rates, finals[0].rates)
    return ratio.low <= 1.0 < ratio.ratio - SAME_SPEED


def _choose(work: Work, finals: tuple[Finalist, ...]) -> Choice:
    return choose(finals[0], finals[1:], baseline_allowed=work.float32_allowed)


def _confirm(work: Work, plain: Recipe, seconds: float, winner: Proven, findings: Findings) -> None:
    """Measure the winner against the baseline and against float32 at its own batch."""
    work.listener(Stage("finish", "the winner against float32"))
    same = replace(
        plain,
        batch_size=winner.recipe.batch_size,
        accumulation_steps=winner.recipe.accumulation_steps,
    )
    differs = winner.recipe.key() != same.key()  # in more than its batch
    beside = [same] if differs and same.key() != plain.key() else []
    try:
        finals = _alternate(work, [plain, winner.recipe, *beside], seconds, winner, findings)
    except FinalistFailed as failed:
        if not beside or failed.recipe.key() != same.key():
            raise
        differs, beside = False, []  # float32 does not run at this batch: nothing to compare with
        finals = _alternate(work, [plain, winner.recipe], seconds, winner, findings)
    if _undecided(finals):
        recipes = [final.recipe for final in finals]
        more = _alternate(work, recipes, seconds, winner, findings)
        finals = tuple(
            replace(one, rates=one.rates + other.rates)
            for one, other in zip(finals, more, strict=True)
        )
    findings.choice = _choose(work, finals[:2])
    if findings.choice.recipe.key() == plain.key():
        return
    findings.proven = winner
    findings.speedup = paired_ratio(finals[1].rates, finals[0].rates)
    if differs:
        rival = finals[2] if beside else finals[0]
        findings.speedup_same_batch = paired_ratio(finals[1].rates, rival.rates)


def _alternate(
    work: Work,
    recipes: Sequence[Recipe],
    seconds: float,
    winner: Proven,
    findings: Findings,
) -> tuple[Finalist, ...]:
    times = [seconds] + [winner.step_seconds] * (len(recipes) - 1)
    return contest_among(work, recipes, times, work.options.rounds, findings)


def contest_among(
    work: Work,
    recipes: Sequence[Recipe],
    seconds: Sequence[float],
    rounds: int,
    findings: Findings,
) -> tuple[Finalist, ...]:
    """Run recipes in alternation, together if their memory fits; `findings` keeps what it took."""
    budget = work.memory_bytes
    together = budget is None or sum(findings.peak_of(recipe) for recipe in recipes) <= budget
    contest = Contest(
        recipes,
        work.runner,
        seed=work.options.seed,
        together=together,
        listener=work.listener,
        watch=work.watch,
    )
    with contest:
        finals = contest.run(rounds, seconds)
    for recipe, measured in zip(recipes, contest.measured, strict=True):
        findings.finals[recipe.key()] = measured
    return finals
