"""Small texts shared by reports: stages, rates and sizes in words; untrusted text made safe."""

from __future__ import annotations

from autoprec.core.number_words import plain_number, rate_number
from autoprec.core.speed.trial_results import Status
from autoprec.reporting.flags import with_flags
from autoprec.tuning.events import Note


def printable(text: str) -> str:
    """Make control characters in foreign text visible, so that it cannot control a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def note_text(note: Note) -> str:
    """Return a note as whoever types flags reads it; a warning begins with "warning"."""
    return f"{'warning: ' if note.warning else ''}{with_flags(note.text)}"


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
    "proof": "check",
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
    return f"{rate_number(rate)} samples/s"


def seconds_text(seconds: float) -> str:
    """Show a duration: "3.1 ms", "1.24 s"."""
    return f"{plain_number(1e3 * seconds)} ms" if seconds < 1 else f"{plain_number(seconds)} s"


def bytes_text(count: int) -> str:
    """Show a size: "412 MiB", "3.2 GiB"."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
