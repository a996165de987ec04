"""What every backend must do: one suite, run against the simulated one, PyTorch and Keras.

A backend's test module makes a `Subject` and subclasses `BackendContract`. The tests call only what
`autoprec.backends.protocol` names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from autoprec.backends import registry
from autoprec.backends.protocol import Backend, Task
from autoprec.core.codec import from_plain, to_plain
from autoprec.core.device.observation import DeviceKind
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import TaskFacts
from autoprec.core.numerics import proof_steps
from autoprec.core.numerics.exact_settings import agrees
from autoprec.core.numerics.traces import SettingsComparison
from autoprec.core.recipe import KNOBS, LossScale, Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.errors import TaskError

QUICK = TimingBudget(seconds=0.2, min_steps=3, max_steps=5)
FLOAT32 = Recipe(batch_size=8)
BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)
FLOAT16 = Recipe(policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale(initial=1024.0))


@dataclass(frozen=True)
class Subject:
    """A backend with a small healthy task and one that breaks."""

    backend: Backend
    task: Task
    broken: Callable[[], Task]


class BackendContract:
    """The tests; a subclass gives the fixture `subject`, and another device if it means one."""

    device = "cpu"

    def reports(self) -> tuple[list[tuple[str, int]], Callable[[str, int], None]]:
        seen: list[tuple[str, int]] = []
        return seen, lambda phase, step: seen.append((phase, step))

    def facts(self, subject: Subject, task: Task | None = None) -> TaskFacts:
        _, report = self.reports()
        return subject.backend.describe(
            task or subject.task, device=self.device, seed=0, batch_size=8, report=report
        )

    def open(self, subject: Subject, recipe: Recipe, task: Task | None = None) -> Any:
        _, report = self.reports()
        return subject.backend.open(
            task or subject.task, recipe, device=self.device, seed=0, report=report
        )

    def tracer(self, subject: Subject) -> Any:
        _, report = self.reports()
        return subject.backend.tracer(subject.task, device=self.device, seed=0, report=report)

    def test_names_its_versions_and_devices(self, subject: Subject) -> None:
        versions = dict(subject.backend.versions())
        assert subject.backend.name in versions
        assert all(isinstance(v, str) and v for v in versions.values())
        assert self.device in list(subject.backend.devices())
        assert DeviceKind.CPU in subject.backend.trains_on()
        assert set(subject.backend.built_for()) <= set(subject.backend.trains_on())
        assert DeviceKind.CPU not in subject.backend.built_for()

    def test_declares_what_it_can_without_being_imported(self, subject: Subject) -> None:
        declared = registry.capabilities(subject.backend.name)
        assert subject.backend.capabilities is declared
        assert declared.title
        assert set(declared.searched_knobs) <= set(declared.knobs) <= set(KNOBS)

    def test_owns_its_models_and_no_others(self, subject: Subject) -> None:
        model = subject.task.build_model()
        assert registry.owner(model) == subject.backend.name
        with pytest.raises(TaskError, match="expected"):
            registry.owner(object())
        assert subject.backend.device_of(model).partition(":")[0] in ("cpu", "cuda", "mps", "xpu")

    def test_describes_the_task_as_plain_values(self, subject: Subject) -> None:
        facts = self.facts(subject)
        assert facts.framework == subject.backend.name
        assert facts.parameters > 0
        assert facts.nominal == 8
        assert 0 < facts.samples <= 8
        assert facts.units
        assert from_plain(TaskFacts, to_plain(facts)) == facts

    def test_describes_the_same_task_the_same_way(self, subject: Subject) -> None:
        first, second = self.facts(subject), self.facts(subject)
        timed: dict[str, Any] = {"step_seconds": 0, "update_seconds": 0, "optimizer_share": 0}
        timed |= {"slow_operator": "", "slow_operator_share": 0}
        assert replace(first, **timed) == replace(second, **timed)

    def test_reports_progress_by_phase(self, subject: Subject) -> None:
        seen, report = self.reports()
        session = subject.backend.open(
            subject.task, FLOAT32, device=self.device, seed=0, report=report
        )
        session.time_steps(QUICK)
        session.close()
        phases = [phase for phase, _ in seen]
        assert "build" in phases
        assert phases[-1] == "steps"

    @pytest.mark.parametrize("recipe", [FLOAT32, BFLOAT16, FLOAT16], ids=lambda r: r.policy.value)
    def test_times_steps_and_counts_samples(self, subject: Subject, recipe: Recipe) -> None:
        session = self.open(subject, recipe)
        measured = session.time_steps(QUICK)
        session.close()
        assert 0 < measured.low <= measured.step_seconds <= measured.high
        assert measured.steps >= 1
        assert measured.samples_per_step == 8
        assert measured.finite
        assert measured.peak_memory_bytes > 0

    def test_accumulation_keeps_the_effective_batch(self, subject: Subject) -> None:
        session = self.open(subject, replace(FLOAT32, batch_size=4, accumulation_steps=2))
        measured = session.time_steps(QUICK)
        session.close()
        assert measured.samples_per_step == 8

    def test_a_session_can_be_timed_again(self, subject: Subject) -> None:
        session = self.open(subject, FLOAT32)
        first, second = session.time_steps(QUICK), session.time_steps(QUICK)
        session.close()
        assert first.samples_per_step == second.samples_per_step

    def test_sessions_side_by_side_close_in_any_order(self, subject: Subject) -> None:
        first, second = self.open(subject, FLOAT32), self.open(subject, BFLOAT16)
        first.time_steps(QUICK)
        first.close()
        assert second.time_steps(QUICK).samples_per_step == 8
        second.close()

    def test_the_reference_is_reproducible(self, subject: Subject) -> None:
        runs = [
            self.tracer(subject).reference(batch_size=8, steps=6, checkpoints=(0, 2))
            for _ in range(2)
        ]
        assert runs[0].losses == runs[1].losses
        assert len(runs[0].losses) == 6
        assert runs[0].finite

    def test_a_reference_that_settles_ends_where_its_losses_say(self, subject: Subject) -> None:
        tracer = self.tracer(subject)
        whole = tracer.reference(batch_size=8, steps=33, checkpoints=())
        settled = tracer.reference(
            batch_size=8, steps=33, checkpoints=(0, 32), stop_at_plateau=True
        )
        made = next(n for n in range(1, 34) if proof_steps.has_ended(whole.losses[:n], 33))
        assert settled.losses == whole.losses[:made]
        assert made in (30, 33)
        steps = [point.step for point in tracer.compare_steps(recipe=FLOAT32)]
        assert steps == [step for step in (0, 32) if step < made]

    def test_float32_compared_with_itself_is_equal(self, subject: Subject) -> None:
        tracer = self.tracer(subject)
        tracer.reference(batch_size=8, steps=4, checkpoints=(0, 2))
        points = tracer.compare_steps(recipe=FLOAT32)
        assert [point.step for point in points] == [0, 2]
        for point in points:
            assert point.loss == pytest.approx(point.reference, rel=1e-5)
            assert point.gradient_error == pytest.approx(0.0, abs=1e-4)

    def test_bfloat16_rounds_but_stays_near(self, subject: Subject) -> None:
        tracer = self.tracer(subject)
        tracer.reference(batch_size=8, steps=4, checkpoints=(0, 2))
        for point in tracer.compare_steps(recipe=BFLOAT16):
            assert point.loss != point.reference
            assert point.loss == pytest.approx(point.reference, rel=0.05)
            assert point.gradient_error is not None
            assert 0 < point.gradient_error < 0.5

    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_settings_that_keep_the_arithmetic_compute_what_plain_float32_does(
        self, subject: Subject, accumulation: int
    ) -> None:
        tracer = self.tracer(subject)
        recipe = replace(BFLOAT16, batch_size=8 // accumulation, accumulation_steps=accumulation)
        found = tracer.compare_settings(recipe=recipe)
        assert found.points
        assert found.updates
        assert all(each is not None and each > 0.0 for each in found.weights_noise)
        assert agrees(found)
        assert from_plain(SettingsComparison, to_plain(found)) == found

    def test_noise_draws_every_checkpoint(self, subject: Subject) -> None:
        tracer = self.tracer(subject)
        tracer.reference(batch_size=8, steps=4, checkpoints=(0, 2))
        points = tracer.noise(draws=2)
        assert sorted(point.step for point in points) == [0, 0, 2, 2]
        assert all(point.loss != point.reference for point in points)

    def test_a_float32_trajectory_repeats_the_reference(self, subject: Subject) -> None:
        tracer = self.tracer(subject)
        reference = tracer.reference(batch_size=8, steps=6, checkpoints=(0,))
        run = tracer.trajectory(recipe=FLOAT32, seed=0, steps=6)
        assert run.losses == pytest.approx(reference.losses, rel=1e-5)

    def test_a_seed_changes_the_trajectory(self, subject: Subject) -> None:
        tracer = self.tracer(subject)
        first = tracer.trajectory(recipe=FLOAT32, seed=0, steps=4)
        second = tracer.trajectory(recipe=FLOAT32, seed=1, steps=4)
        assert first.losses != second.losses

    def test_backward_exponents_lie_in_bfloat16s_range(self, subject: Subject) -> None:
        tracer = self.tracer(subject)
        found = tracer.backward_exponents(recipe=FLOAT16, batches=2)
        assert found.batches == 2
        assert found.largest is not None
        assert found.smallest is not None
        assert -140 <= found.smallest <= found.largest <= 128

    def test_unit_magnitudes_name_the_units(self, subject: Subject) -> None:
        tracer = self.tracer(subject)
        known = {unit.path for unit in self.facts(subject).units}
        traces = tracer.unit_magnitudes(recipe=FLOAT16)
        assert traces
        assert {trace.path for trace in traces} <= known

    def test_an_error_of_the_users_leaves_as_it_is(self, subject: Subject) -> None:
        with pytest.raises(ZeroDivisionError):
            self.open(subject, FLOAT32, subject.broken())

    def test_the_surgeon_returns_what_the_loop_uses(self, subject: Subject) -> None:
        model = subject.task.build_model()
        precision = subject.backend.surgeon().apply(
            FLOAT32, model=model, optimizers=(), device=self.device
        )
        assert precision.policy is Policy.FLOAT32
        assert precision.batch_size == 8
        assert (precision.steps, precision.skipped) == (0, 0)
        precision.load_state_dict(precision.state_dict())
        with precision as entered:
            assert entered is precision
        precision.restore()
