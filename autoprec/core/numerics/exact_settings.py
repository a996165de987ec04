"""Judges settings that must not change what float32 computes: layout, splitting, compiler, knobs.

They change the order of operations, and so the last digits. The null says how much that may be: the
same comparison between plain float32 and plain float32 with weights that are off by a few times its
own rounding. What is further away is another computation, and trains something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Literal

from autoprec.core.number_words import percent
from autoprec.core.numerics.reference_recipe import Setting
from autoprec.core.numerics.tolerance import (
    SMALLEST_LOSS_SHARE,
    finite_or_none,
    or_infinity,
    relative_deviation,
)
from autoprec.core.numerics.traces import SettingsComparison, SettingsPoint
from autoprec.core.numerics.verdict import Verdict

ALLOWED = 1e-3
"""The relative error that is always allowed: sums in another order stay far below it."""

ALLOWED_OF_METRIC = 0.02
"""The same for the metric of the task's own `evaluate`, which may count what changes sides."""

NOISE_FACTOR = 10.0
"""How many times as far as the null's a result may be off."""

_CAUSES: Mapping[str, str] = {
    "accumulation_steps": (
        "a loss that divides by what it counts in the batch (valid tokens, class weights, "
        "objects), or a model that mixes samples, is another one for a part of the batch"
    ),
    "memory_format": (
        "the model depends on how tensors lie in memory (as_strided, stride(), is_contiguous(), "
        "a view of the storage)"
    ),
    "compile": "the compiler changes what this model computes",
    "alignment": "a padded module, or what uses its weights, computes something else",
    "fused_optimizer": "the optimizer's fused kernel makes other updates",
    "threads": "the result depends on the number of threads",
    "cudnn_benchmark": "another convolution algorithm gives other results",
    "attention": "another kernel of scaled_dot_product_attention gives other results",
}


_COMPILED_DRAWS = "compiled code in float32 (it draws other random numbers)"


@dataclass(frozen=True)
class SettingsVerdict:
    """Whether a recipe's settings compute what plain float32 does, and those that do not.

    `guilty` are the fields or knobs of those: one, or several that do not only together.
    """

    verdict: Verdict
    guilty: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """Return whether the settings may be used."""
        return self.verdict.accepted


@dataclass(frozen=True)
class _Difference:
    """How far one result is off, what is allowed, and how to say it."""

    what: str
    error: float
    null: float
    of: str = "{}"
    allowed: float = ALLOWED

    @property
    def limit(self) -> float:
        return max(self.allowed, NOISE_FACTOR * self.null)

    @property
    def text(self) -> str:
        return self.what + " " + self.of.format(percent(self.error))


def agrees(found: SettingsComparison) -> bool:
    """Return whether all that was compared is the same up to float32's rounding."""
    return not _wrong(found)


def judge_settings(
    found: SettingsComparison, settings: Sequence[Setting], guilty: Setting | None = None
) -> SettingsVerdict:
    """Judge what was found with these settings; `guilty` is the one that differs alone.

    "equal" means here that the first weights were compared at some batches, and followed for the
    few updates that the reason names: if the arithmetic is the same, no training says more.
    """
    blamed = [guilty] if guilty is not None else list(settings)
    names = " and ".join(each.name for each in blamed)
    result: Literal["equal", "rejected", "unproven"]
    wrong, differences = _wrong(found), _differences(found)
    by_name = {each.what: each for each in differences}
    if wrong and found.drew and any(each.key == "compile" for each in blamed):
        found = replace(found, not_covered=(*found.not_covered, _COMPILED_DRAWS))
        reason = f"not compared: {_COMPILED_DRAWS}"
        wrong, result = [], "unproven"
    elif wrong:
        told = "; ".join(each.text for each in wrong[:2])
        cause = _CAUSES.get(blamed[0].key, "") if len(blamed) == 1 else ""
        reason = (
            f"with {names} it computes something else than plain float32 does at the same weights: "
            f"{told} ({percent(wrong[0].limit)} is allowed)"
        ) + (f"; {cause}" if cause else "")
        result = "rejected"
    elif not found.points:
        reason = f"with {names} nothing could be compared with plain float32"
        result = "unproven"
    else:
        largest = max(each.error for each in differences)
        reason = (
            f"computes what plain float32 does: with {names}, {_what(found)} differ by no more "
            f"than float32's rounding ({percent(largest)}); compared at the same weights, not "
            "trained further"
        )
        result = "equal"
    loss, gradient = by_name.get("its loss"), by_name.get("its gradient")
    verdict = Verdict(
        result,
        reason,
        loss_deviation=None if loss is None else finite_or_none(loss.error),
        gradient_error=None if gradient is None else finite_or_none(gradient.error),
        loss_null=None if loss is None else finite_or_none(loss.null),
        gradient_null=None if gradient is None else finite_or_none(gradient.null),
        covered=(f"{names} in float32: {_what(found)}",) if result == "equal" else (),
        not_covered=found.not_covered,
    )
    return SettingsVerdict(verdict, tuple(each.key for each in blamed) if wrong else ())


def raises(settings: Sequence[Setting], guilty: Setting | None, message: str) -> SettingsVerdict:
    """Return the verdict on settings under which the task's own code raises."""
    blamed = [guilty] if guilty is not None else list(settings)
    names = " and ".join(each.name for each in blamed)
    reason = f"with {names} the task's own code raises: {message}"
    verdict = Verdict("rejected", reason, not_covered=("everything after the error",))
    return SettingsVerdict(verdict, tuple(each.key for each in blamed))


def _what(found: SettingsComparison) -> str:
    """Describe what was compared."""
    batches = len(found.points)
    after = f", and the weights after {found.updates} updates" if found.updates else ""
    results = ["loss", "gradient"]
    if found.outputs_seen:
        results.insert(0, "outputs")
    if any(each.buffers for each in found.points):
        results.append("buffers")
    if found.evaluated:
        results.append("evaluation")
    *others, last = results
    listed = f"{', '.join(others)} and {last}"
    return f"{listed} of {batches} batches at the first weights{after}"


def _wrong(found: SettingsComparison) -> list[_Difference]:
    return [each for each in _differences(found) if each.error > each.limit]


def _differences(found: SettingsComparison) -> list[_Difference]:
    known = [each for each in found.points if each.reference is not None]
    if not known:
        return []
    scale = SMALLEST_LOSS_SHARE * abs(known[0].reference or 0.0)

    def largest(
        what: str, said: str, error: Callable[[SettingsPoint], float | None]
    ) -> _Difference:
        return _Difference(
            what, _largest(map(error, known)), _largest(map(error, found.noise)), said
        )

    differences = [
        largest(
            "its outputs",
            "are off by {} of how they vary over the batch",
            attrgetter("outputs_error"),
        ),
        largest(
            "its loss", "is {} off", lambda p: relative_deviation(p.loss, p.reference or 0.0, scale)
        ),
        largest("its gradient", "is {} off", attrgetter("gradient_error")),
        largest("its evaluation", "is {} off", attrgetter("evaluation_error")),
        *_buffer_differences(known, found.noise),
    ]
    metric = or_infinity(found.metric_error), _largest(found.metric_noise)
    differences.append(
        _Difference("the metric of evaluate()", *metric, "is {} off", ALLOWED_OF_METRIC)
    )
    if found.updates:
        weights = or_infinity(found.weights_error), _largest(found.weights_noise)
        after = f"its weights after {found.updates} updates"
        differences.append(_Difference(after, *weights, "moved {} otherwise"))
    return differences


def _buffer_differences(
    points: Sequence[SettingsPoint], noise: Sequence[SettingsPoint]
) -> list[_Difference]:
    """Return how far each buffer's change is off, the largest of all batches; the worst first."""
    errors, nulls = _buffer_errors(points), _buffer_errors(noise)
    differences = [
        _Difference(f"its buffer {name}", error, nulls.get(name, 0.0), "changes {} otherwise")
        for name, error in errors.items()
    ]
    return sorted(differences, key=lambda each: -each.error)


def _buffer_errors(points: Sequence[SettingsPoint]) -> dict[str, float]:
    errors: dict[str, float] = {}
    for each in (buffer for point in points for buffer in point.buffers):
        errors[each.name] = max(errors.get(each.name, 0.0), or_infinity(each.error))
    return errors


def _largest(errors: Iterable[float | None]) -> float:
    return max((or_infinity(each) for each in errors), default=0.0)
