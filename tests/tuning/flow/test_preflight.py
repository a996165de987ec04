"""Which recipes a task's own settings leave to try."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from factories import device_of_family

from autoprec.core.device.facts import DeviceFacts, DTypeFact
from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.policies import Refusal, propose
from autoprec.core.dtypes import DType, Policy
from autoprec.core.measurement import Dimension, TaskFacts, Unit
from autoprec.core.recipe import Alignment, Distributed
from autoprec.core.speed.space import Space, powers_of_two
from autoprec.errors import UserCodeError
from autoprec.tuning.events import Event, Note
from autoprec.tuning.flow.preflight import describe
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.options import Options
from autoprec.tuning.search.task_space import baseline_point, build_space, refusals_for_task
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.task_source import TaskSource

NATIVE = DTypeFact(Support.NATIVE)
FACTS = DeviceFacts(
    Observation(DeviceKind.CUDA), "f", "a GPU", dict.fromkeys([DType.FLOAT32, DType.TF32], NATIVE)
)


def space(
    events: list[Event],
    policies: tuple[Policy, ...] = (),
    facts: DeviceFacts = FACTS,
    align: int | None = None,
    **task: Any,
) -> Space:
    target = cast(Target, SimpleNamespace(facts=facts))
    options = Options(policies=policies, align=align)
    job = TuningJob(TaskSource(Path("task.py")), target, options, events.append)
    known = TaskFacts("keras", {}, 32, 32, parameters=100, batch_size=32, **task)
    return build_space(job, known, facts, propose(facts))


def test_tf32_is_tried_where_it_is_another_recipe_than_the_baseline() -> None:
    events: list[Event] = []
    assert Policy.TF32 in space(events).policies
    assert events == []
    assert Policy.TF32 not in space(events, uses_tf32=True).policies
    assert [type(event) for event in events] == [Note]


@pytest.mark.parametrize(("compiled", "levels"), [(False, (False, True)), (True, (False,))])
def test_a_model_that_compiles_itself_is_left_to_it(
    compiled: bool, levels: tuple[bool, ...]
) -> None:
    assert space([], compiled=compiled).compile == levels


CPU = replace(FACTS, observation=Observation(DeviceKind.CPU))


def built(
    options: Options | None = None, facts: DeviceFacts = FACTS, **task: Any
) -> tuple[Space, list[str]]:
    """The space of a task of torch's, and what was noted about it."""
    said: list[str] = []
    options = options or Options()
    target = cast(Target, SimpleNamespace(facts=facts))
    job = TuningJob(
        TaskSource(Path("task.py")),
        target,
        options,
        lambda event: said.append(cast(Note, event).text),
    )
    known = replace(TaskFacts("torch", {}, 32, 32, parameters=100), **task)
    return build_space(job, known, facts, propose(facts, options.policies)), said


def test_float32_is_measured_first_though_it_was_not_asked_for() -> None:
    native = {**FACTS.dtypes, DType.BFLOAT16: NATIVE}
    facts = replace(FACTS, dtypes=native)
    found, _ = built(Options(policies=(Policy.MIXED_BFLOAT16,)), facts)
    assert found.policies == (Policy.FLOAT32, Policy.MIXED_BFLOAT16)
    both, _ = built(Options(policies=(Policy.MIXED_BFLOAT16, Policy.FLOAT32)), facts)
    assert both.policies == (Policy.MIXED_BFLOAT16, Policy.FLOAT32)


def test_tf32_that_was_asked_for_is_tried_though_the_baseline_has_it() -> None:
    found, said = built(Options(policies=(Policy.TF32,)), uses_tf32=True)
    assert found.policies == (Policy.FLOAT32, Policy.TF32)
    assert said == []


@pytest.mark.parametrize(
    ("facts", "options", "task", "sizes"),
    [
        (CPU, Options(), {}, powers_of_two(8, 65536)),
        (FACTS, Options(batch="max"), {}, powers_of_two(8, 65536)),
        (CPU, Options(sampler="tpe"), {}, powers_of_two(8, 1024)),
        (FACTS, Options(sampler="grid"), {}, powers_of_two(8, 4096)),
        (CPU, Options(batch=96), {}, (96,)),
        (CPU, Options(batch=32), {"batch_size": 32, "splittable": False}, (32,)),
        (CPU, Options(batch_sizes=(4, 99)), {}, (4, 99)),
        (CPU, Options(), {"batch_size": 32}, (8, 16, 32)),
        (CPU, Options(batch_sizes=(4, 32)), {"batch_size": 32}, (4, 32)),
        (CPU, Options(batch_sizes=(4, 32)), {"batch_size": 32, "splittable": False}, (32,)),
        (CPU, Options(), {"nominal": 32, "samples": 20}, (20,)),
        (CPU, Options(batch_sizes=(8,)), {"nominal": 32, "samples": 20}, (8,)),
    ],
)
def test_the_batches_are_those_that_the_device_the_task_and_the_user_leave(
    facts: DeviceFacts, options: Options, task: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    found, said = built(options, facts, **task)
    assert found.batch_sizes == sizes
    assert found.effective_batch == task.get("batch_size")
    split = "its batch of 32 is not split: " if task.get("splittable") is False else None
    idle = "BATCH_SIZE = 32 of the task file is kept, so `batch=32` chooses nothing"
    kept = task.get("batch_size") and options.batch == "32"
    assert said == [*([idle] if kept else []), *([split] if split else [])]


@pytest.mark.parametrize("convolutions", [True, False])
def test_channels_last_is_tried_where_there_are_convolutions(convolutions: bool) -> None:
    found, _ = built(convolutions=convolutions)
    assert found.memory_formats == ("contiguous", "channels_last")[: 1 + convolutions]


@pytest.mark.parametrize(
    ("framework", "facts", "asked", "levels"),
    [
        ("torch", FACTS, None, (False, True)),
        ("torch", CPU, None, (False,)),
        ("keras", CPU, None, (False, True)),
        ("torch", FACTS, False, (False,)),
        ("keras", CPU, False, (False,)),
        ("torch", CPU, True, (False, True)),
    ],
)
def test_compiled_recipes_are_tried_where_that_tends_to_pay_or_as_asked(
    framework: str, facts: DeviceFacts, asked: bool | None, levels: tuple[bool, ...]
) -> None:
    assert built(Options(compile=asked), facts, framework=framework)[0].compile == levels


def test_knobs_that_mean_nothing_here_are_left_out_with_a_note() -> None:
    asked = {"steps_per_execution": (1, 8), "keep_memory": (False, True), "threads": (2, 1)}
    found, said = built(Options(knobs=asked, extras=False))
    assert found.knobs == {"threads": (2, 1)}
    assert said == [
        "setting steps_per_execution does not apply to torch and is left out",
        "setting keep_memory needs glibc's malloc on a CPU and is left out",
    ]
    found, said = built(Options(knobs=asked, extras=False), CPU, keepable_memory=True)
    assert found.knobs == {"keep_memory": (False, True), "threads": (2, 1)}


def test_modes_that_replay_cuda_graphs_are_tried_where_no_batch_is_split() -> None:
    modes = ("default", "reduce-overhead", "max-autotune")
    asked = Options(knobs={"compile_mode": modes}, extras=False, compile=True)
    lost = "a split batch's gradients do not survive the CUDA graphs of that mode"
    graphs = "setting compile_mode: reduce-overhead and max-autotune"
    for whole in ({}, {"batch_size": 32, "splittable": False, "split_reason": "it is small"}):
        assert built(asked, **whole)[0].knobs == {"compile_mode": modes}
    found, said = built(asked, batch_size=32)
    assert said == [f"{graphs} tried at batch 32 alone, for {lost}"]
    recipes = [found.recipe(point) for point in found.points()]
    replaying = [r for r in recipes if r.knobs.get("compile_mode") in modes[1:]]
    assert {(r.batch_size, r.accumulation_steps, r.compile) for r in replaying} == {(32, 1, True)}
    assert any(recipe.accumulation_steps > 1 and recipe.compile for recipe in recipes)
    found, said = built(replace(asked, batch_sizes=(8, 16)), batch_size=32)
    assert found.knobs == {}
    assert said == [f"{graphs} left out: {lost}; --batch-sizes 32 splits none"]


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ({"surveyed": 3}, "batches differ in shape, and every shape is captured anew"),
        ({"keeps_outputs": True}, "the task keeps outputs of the model beyond the step, which the"),
    ],
)
def test_modes_that_replay_cuda_graphs_are_refused_with_the_reason(
    task: dict[str, Any], reason: str
) -> None:
    asked = Options(knobs={"compile_mode": ("reduce-overhead",)}, extras=False, compile=True)
    found, said = built(asked, **task)
    assert found.knobs == {}
    assert said[0].startswith(f"setting compile_mode: reduce-overhead left out: {reason}")


def test_further_knobs_are_tried_unless_they_are_off_and_levels_asked_for_come_first() -> None:
    slow = {"optimizer_share": 0.3, "keepable_memory": True}
    assert set(built(None, CPU, **slow)[0].knobs) == {"fused_optimizer", "keep_memory"}
    assert built(Options(extras=False), CPU, **slow)[0].knobs == {}
    asked = Options(knobs={"fused_optimizer": (True,)})
    assert built(asked, CPU, **slow)[0].knobs["fused_optimizer"] == (False, True)


@pytest.mark.parametrize(
    ("asked", "levels"),
    [
        ({"threads": (1,)}, (2, 1)),
        ({"threads": (1, 2)}, (2, 1)),
        ({"cudnn_benchmark": (True,)}, (False, True)),
        ({"compile_mode": ("reduce-overhead",)}, ("default", "reduce-overhead")),
    ],
)
def test_what_is_asked_for_is_compared_with_the_default(
    asked: dict[str, Any], levels: tuple[Any, ...]
) -> None:
    """A single value was its own default: nothing tried it and nothing said so."""
    found, _ = built(Options(knobs=asked, extras=False, compile=True), threads=2)
    assert found.knobs == dict.fromkeys(asked, levels)


def test_a_knob_with_nothing_to_compare_is_told() -> None:
    found, said = built(Options(knobs={"threads": (2,)}, extras=False), threads=2)
    assert found.knobs == {}
    assert any("setting threads: nothing to compare 2 with" in text for text in said)


def test_what_is_no_plain_float32_is_warned_of() -> None:
    _, said = built(low_precision="bfloat16 weights", warnings=("mind the gap",))
    assert said == ["this is not plain float32: bfloat16 weights", "mind the gap"]


def test_no_knob_rounds_the_products_of_islands_that_were_asked_for() -> None:
    native = replace(CPU, dtypes={**CPU.dtypes, DType.BFLOAT16: NATIVE})
    units = (Unit("norm", "Norm"),)
    assert set(built(None, native, units=units)[0].knobs) == {"implicit_bfloat16"}
    islands = Options(float32_modules=("norm",))
    assert built(islands, native, units=units)[0].knobs == {}
    asked = replace(islands, knobs={"implicit_bfloat16": (False, True)})
    found, said = built(asked, native, units=units)
    assert found.knobs == {}
    assert said == [
        "setting implicit_bfloat16 rounds every float32 product, even those of `float32_modules`, "
        "and is left out"
    ]


def test_islands_that_were_asked_for_are_in_every_recipe() -> None:
    found, _ = built(Options(float32_modules=("n*",)), units=(Unit("norm", "Norm"),))
    assert found.float32_modules == ("norm",)
    assert built()[0].float32_modules == ()


def dimensions(**sizes: int) -> tuple[Dimension, ...]:
    return tuple(Dimension(module, "Dense", "units", size) for module, size in sizes.items())


@pytest.mark.parametrize(
    ("family", "sizes", "paddings"),
    [
        ("nvidia-a100", {"head": 1001}, ((8, ("head",)), (64, ("head",)))),
        ("nvidia-a100", {"head": 1000}, ((64, ("head",)),)),
        ("nvidia-a100", {"head": 63}, ((8, ("head",)),)),
        ("nvidia-a100", {"a": 1000, "b": 1001}, ((8, ("b",)), (64, ("a", "b")))),
        ("nvidia-a100", {"head": 1024}, ()),
        ("nvidia-t4", {"head": 1001}, ((8, ("head",)), (64, ("head",)))),
        ("apple-m4", {"head": 1001}, ((8, ("head",)),)),
        ("intel-sapphire-rapids", {"head": 1001}, ()),
        ("amd-zen5", {"head": 1001}, ()),
        ("arm-graviton3", {"head": 1001}, ()),
        ("tpu-v5e", {"head": 1001}, ()),
    ],
)
def test_padding_is_tried_to_the_least_and_the_best_where_the_catalogue_has_it_plausible(
    family: str, sizes: dict[str, int], paddings: tuple[tuple[int, tuple[str, ...]], ...]
) -> None:
    built = space([], facts=device_of_family(family), dimensions=dimensions(**sizes))
    tried = tuple((each.multiple, each.modules) for each in built.alignments)
    assert tried == ((1, ()), *paddings)


def test_padding_that_was_asked_for_is_tried_on_any_device() -> None:
    built = space(
        [], facts=device_of_family("amd-zen5"), align=16, dimensions=dimensions(head=1001)
    )
    assert built.alignments == (Alignment(), Alignment(16, ("head",)))


def failing(message: str, batch_size: int | None = 8) -> Any:
    """A runner whose first step fails with this error of the user's code."""

    def fail(*_: Any, **__: Any) -> None:
        raise WorkerFailure(FailureKind.USER_ERROR, message, frames="their lines")

    return SimpleNamespace(load=lambda: SimpleNamespace(batch_size=batch_size), call=fail)


@pytest.mark.parametrize(
    ("name", "hinted"), [("data/a.npy", True), ("data/b.npy", False), ("/data/a.npy", False)]
)
def test_a_relative_path_that_is_meant_from_the_task_is_told(
    tmp_path: Path, name: str, hinted: bool
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.npy").write_text("")
    message = f"FileNotFoundError: [Errno 2] No such file or directory: '{name}'"
    target = cast(Target, SimpleNamespace(facts=FACTS))
    job = TuningJob(TaskSource(tmp_path / "task.py"), target, Options(), lambda event: None)
    with pytest.raises(UserCodeError) as caught:
        describe(job, failing(message))
    assert str(caught.value).startswith(f"in the first float32 step: {message}")
    assert (f"It is in {tmp_path}" in str(caught.value)) == hinted


@pytest.mark.parametrize(
    ("message", "batch_size", "asked", "hinted"),
    [
        ("got logits shape [32,32] and labels shape [16]", None, None, "a batch of 32 was tried"),
        ("got logits shape [64,64] and labels shape [16]", None, (64,), "a batch of 64 was tried"),
        ("got logits shape [32,32] and labels shape [16]", 32, None, ""),
        ("name 'x' is not defined in line 320", None, None, ""),
    ],
)
def test_an_error_about_a_batch_that_nobody_asked_for_names_batch_size(
    message: str, batch_size: int | None, asked: tuple[int, ...] | None, hinted: str
) -> None:
    target = cast(Target, SimpleNamespace(facts=FACTS))
    options = Options(batch_sizes=asked)
    job = TuningJob(TaskSource(Path("task.py")), target, options, lambda event: None)
    with pytest.raises(UserCodeError) as caught:
        describe(job, failing(message, batch_size))
    assert str(caught.value).startswith(f"in the first float32 step: {message}")
    assert hinted in str(caught.value)
    assert ("name that: BATCH_SIZE in" in str(caught.value)) == bool(hinted)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (Options(), "batch 32"),
        (Options(batch_sizes=(32,)), "batch 32"),
        (Options(batch_sizes=(32, 64)), "batch 32 and at none of those asked for"),
    ],
)
def test_a_model_of_one_batch_size_is_tried_at_that_only_and_it_is_said(
    options: Options, where: str
) -> None:
    found, said = built(options, fixed_batch=True, splittable=False, split_reason="its state")
    assert found.batch_sizes == (32,)
    assert baseline_point(found)["batch_size"] == 32
    assert said == [f"every recipe runs at {where}: its state"]


def test_a_model_that_cannot_be_compiled_is_not_tried_so_and_the_reason_is_a_refusal() -> None:
    reason = "Keras does not compile a model with turn (RandomRotation)"
    assert space([], not_compilable=reason).compile == (False,)
    job = TuningJob(TaskSource(Path("task.py")), cast(Target, None), Options(), lambda event: None)
    known = TaskFacts("keras", {}, 32, 32, parameters=100, not_compilable=reason)

    def refused(**changes: str) -> tuple[Refusal, ...]:
        plain = Space((Policy.FLOAT32,), (32,))
        return refusals_for_task(job, replace(known, **cast(Any, changes)), CPU, plain)

    assert refused() == (Refusal("compiled", reason),)
    assert refused(framework="torch") == ()
    assert refused(not_compilable="") == ()


def test_ranks_divide_the_batch_and_bring_levels_of_their_own() -> None:
    space, _ = built(Options(nproc=2), batch_size=64)
    assert space.batch_sizes == (8, 16, 32)
    assert baseline_point(space)["batch_size"] == 32
    assert space.recipe(baseline_point(space)).effective_batch == 64
    assert space.distributed == Distributed("ddp", 2)
    assert space.rank_levels == {"reduce_dtype": ("float32", "bfloat16"), "bucket_mb": (25, 100)}
    sharded, _ = built(Options(nproc=2, engine="fsdp2"), batch_size=64)
    assert list(sharded.rank_levels) == ["reduce_dtype", "reshard_after_forward"]
    few, _ = built(Options(nproc=2, extras=False))
    assert list(few.rank_levels) == ["reduce_dtype"]
    alone, _ = built(Options(), batch_size=64)
    assert (alone.distributed, alone.rank_levels) == (None, {})


def test_a_batch_that_must_stay_whole_is_split_among_the_ranks_only() -> None:
    task = {"batch_size": 64, "splittable": False, "split_reason": "BatchNorm"}
    space, said = built(Options(nproc=2), **task)
    assert space.batch_sizes == (32,)
    assert "its batch of 64 is split among the ranks only: BatchNorm" in said
    whole, said = built(Options(), **task)
    assert whole.batch_sizes == (64,)
    assert "its batch of 64 is not split: BatchNorm" in said
