"""Proves that a recipe's settings compute what plain float32 does, and finds the one that does not.

A combination of settings is compared once in a tuning, in float32: every policy may use it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoprec.backends.protocol import Tracer
from autoprec.core.numerics.exact_settings import (
    SettingsVerdict,
    agrees,
    judge_settings,
    raises,
)
from autoprec.core.numerics.reference_recipe import Setting, settings_in_float32, settings_of
from autoprec.core.numerics.traces import SettingsComparison
from autoprec.core.recipe import Recipe
from autoprec.errors import AutoprecError, first_line
from autoprec.workers.failures import FailureKind, WorkerFailure, classify_exception


class SettingsProof:
    """Compares settings through a tracer; keeps what came of it.

    A tracer that failed has lost what it held: `failed` says so until it is asked.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._known: dict[str, SettingsVerdict] = {}
        self.failed = False

    def prove(self, recipe: Recipe) -> SettingsVerdict | None:
        """Judge the recipe's settings in float32; None for one that has none.

        Where the unsplit batch cannot be compared, such as for want of memory, the other settings
        are compared at the micro-batch, and the verdict says what is not covered. Settings under
        which the user's code raises are rejected.
        """
        settings, plain = settings_of(recipe), settings_in_float32(recipe)
        if not settings:
            return None
        known = self._known.get(plain.key())
        if known is None:
            known = self._known[plain.key()] = self._prove(plain, settings)
        return known

    def _prove(self, recipe: Recipe, settings: Sequence[Setting]) -> SettingsVerdict:
        count = recipe.accumulation_steps
        try:
            found = self._tracer.compare_settings(recipe=recipe)
        except Exception as error:
            if count > 1 and (_lacks_memory(error) or raised_by_recipe(error)):
                self.failed = True
                return self._without_whole_batch(recipe, settings, first_line(error))
            if not raised_by_recipe(error):
                raise
            self.failed = True
            return raises(settings, self._find_guilty(settings), first_line(error))
        if not found.points and count > 1:
            return self._without_whole_batch(recipe, settings, "; ".join(found.not_covered))
        return judge_settings(
            found, settings, None if agrees(found) else self._find_guilty(settings)
        )

    def _without_whole_batch(
        self, recipe: Recipe, settings: Sequence[Setting], why: str
    ) -> SettingsVerdict:
        """Judge the other settings at the micro-batch; say that splitting was not compared."""
        missing = f"the unsplit batch of {recipe.batch_size * recipe.accumulation_steps} ({why})"
        others = replace(recipe, accumulation_steps=1)
        rest = settings_of(others)
        judged = self._prove(others, rest) if rest else judge_settings(_NOTHING, settings)
        not_covered = (missing, *judged.verdict.not_covered)
        return replace(judged, verdict=replace(judged.verdict, not_covered=not_covered))

    def _find_guilty(self, settings: Sequence[Setting]) -> Setting | None:
        """Return the first setting that differs by itself; None where only several together do."""
        if len(settings) == 1:
            return settings[0]
        for setting in settings:
            try:
                found = self._tracer.compare_settings(recipe=setting.alone)
            except Exception as error:
                if _lacks_memory(error) and setting.key == "accumulation_steps":
                    self.failed = True
                    continue
                if not raised_by_recipe(error):
                    raise
                self.failed = True
                return setting
            if not agrees(found):
                return setting
        return None


_NOTHING = SettingsComparison()


def _lacks_memory(error: Exception) -> bool:
    kind = error.kind if isinstance(error, WorkerFailure) else classify_exception(error)
    return kind in (FailureKind.OUT_OF_MEMORY, FailureKind.KILLED)


def raised_by_recipe(error: Exception) -> bool:
    """Say whether the user's code failed under the recipe, rather than autoprec or the machine."""
    if isinstance(error, WorkerFailure):
        return error.kind in (
            FailureKind.USER_ERROR,
            FailureKind.UNSUPPORTED,
            FailureKind.NONFINITE,
        )
    return not isinstance(error, AutoprecError | MemoryError | OSError)
