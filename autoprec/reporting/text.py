"""Small texts shared by reports: recipes, rates and sizes in words; untrusted text made safe."""

from __future__ import annotations

from autoprec.core.profile import Profile
from autoprec.core.recipe import (
    KEEP_MEMORY,
    KnobValue,
    Recipe,
    communication_settings,
    describe_batch,
    is_default_communication,
)
from autoprec.core.speed.noise import Ratio
from autoprec.core.speed.space import BATCH, Point
from autoprec.core.speed.trial_results import Status


def printable(text: str) -> str:
    """Replace control characters in foreign text, so that it cannot control a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def chosen_text(profile: Profile) -> str:
    """Describe a profile's recipe in a few words."""
    return recipe_text(profile.recipe, profile.evidence.baseline.weights_in)


def recipe_text(recipe: Recipe, weights_in: str = "") -> str:
    """Describe a recipe in a few words: "mixed_bfloat16, batch 64, channels_last, memory kept".

    `weights_in` is the dtype of the model's weights where they are 16-bit: they are no float32.
    """
    batch = describe_batch(recipe.batch_size, recipe.accumulation_steps, recipe.world_size)
    parts = [recipe.policy.name_with(weights_in), batch]
    if recipe.memory_format != "contiguous":
        parts.append(recipe.memory_format)
    if recipe.compile:
        parts.append("compiled")
    if recipe.alignment.modules:
        parts.append(f"padded to {recipe.alignment.multiple}")
    knobs = {**communication_settings(recipe), **recipe.knobs}
    parts += [_knob_text(name, value) for name, value in knobs.items()]
    if recipe.float32_modules:
        shown = ", ".join(path or "the root" for path in recipe.float32_modules[:3])
        more = len(recipe.float32_modules) - 3
        parts.append(f"{shown}{f' and {more} more' if more > 0 else ''} in float32")
    return ", ".join(parts)


def settings_text(point: Point) -> str:
    """Describe what a point sets besides policy and batch; empty if it sets nothing."""
    parts = [] if point["memory_format"] == "contiguous" else [str(point["memory_format"])]
    parts += ["compiled"] if point["compile"] else []
    if int(point.get("alignment", 1)) > 1:
        parts.append(f"padded to {point['alignment']}")
    known = ("policy", "memory_format", "compile", "alignment", BATCH)
    knobs = {
        name: value
        for name, value in point.items()
        if name not in known and not is_default_communication(name, value)
    }
    parts += [_knob_text(name, value) for name, value in knobs.items() if value is not False]
    return ", ".join(parts)


def _knob_text(name: str, value: KnobValue) -> str:
    name = "memory kept" if name == KEEP_MEMORY and value is True else name
    return name if value is True else f"{name}={value}"


def stage_text(name: str, detail: str = "") -> str:
    """Describe a stage of a tuning: "comparison: the fastest recipes in alternation"."""
    words = _STAGES.get(name, name)
    return f"{words}: {detail}" if detail else words


def phase_text(phase: str, step: int) -> str:
    """Describe what a worker is doing: "timing, step 12"."""
    words = _PHASES.get(phase, phase)
    return f"{words}, step {step}" if step and phase in _STEPPED else words


def status_text(status: Status) -> str:
    """Describe how a trial ended."""
    if status is Status.SHORT_DATA:
        return "fewer samples than the batch needs"
    return status.value.replace("_", " ")


_STAGES = {
    "preflight": "first step",
    "reranking": "comparison",
    "islands": "float32 modules",
}

_PHASES = {
    "load": "loading the task",
    "build": "building the model",
    "data": "making batches",
    "describe": "inspecting the model",
    "compile": "compiling",
    "warmup": "warming up",
    "steps": "timing",
    "trace": "tracing",
    "compare_steps": "one step at the same weights",
    "noise": "one step with noise",
    "exponents": "measuring magnitudes",
    "trajectory": "training",
    "evaluate": "evaluate(model)",
}

_STEPPED = ("steps", "compare_steps", "noise", "trajectory")


def rate_text(rate: float) -> str:
    """Show a throughput with three significant digits: "1450 samples/s"."""
    return f"{rate:.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s"


def ratio_text(ratio: Ratio) -> str:
    """Show a ratio with its interval: "1.84x (1.79-1.88, 7 rounds)"."""
    return f"{ratio.ratio:.2f}x ({ratio.low:.2f}-{ratio.high:.2f}, {ratio.rounds} rounds)"


def seconds_text(seconds: float) -> str:
    """Show a duration: "3.1 ms", "1.24 s"."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def bytes_text(count: int) -> str:
    """Show a size: "412 MiB", "3.2 GiB"."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def percent_text(share: float) -> str:
    """Show a small share with two significant digits: "0.3 %", "0.0018 %"."""
    return f"{100 * share:.2g} %"


def dtype_text(profile: Profile) -> str:
    """Return the dtype that a profile's recipe computes matrix products in."""
    return profile.recipe.policy.compute_dtype_with(profile.evidence.baseline.weights_in).value
