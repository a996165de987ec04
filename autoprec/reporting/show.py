"""A profile in a few lines of text: recipe, gain, verdict, if it holds, what to know of it."""

from __future__ import annotations

from collections.abc import Iterator

from autoprec.core.profile import Profile
from autoprec.reporting.closing_sentence import closing_sentence, further_lines
from autoprec.reporting.flags import with_flags
from autoprec.reporting.text import printable, rate_text, seconds_text


def profile_lines(profile: Profile) -> list[str]:
    """Return the lines that `autoprec show` prints."""
    return [printable(line) for line in _lines(profile)]


def _lines(profile: Profile) -> Iterator[str]:
    evidence, device = profile.evidence, profile.device
    yield f"{profile.task.file}: {profile.describe_recipe()}"
    yield closing_sentence(profile)
    yield from further_lines(profile)
    yield f"numerics: {evidence.parity.verdict}: {evidence.parity.reason}"
    if evidence.chosen.step_seconds:
        rate, step = evidence.chosen.samples_per_second, evidence.chosen.step_seconds
        yield f"speed: {rate_text(rate)}, step {seconds_text(step)}"
    software = ", ".join(f"{name} {version}" for name, version in profile.software.items())
    yield f"made on {device.name or device.family} ({device.family}) with {software}"
    yield f"tuned {profile.created}, {evidence.trials} trials"
    for refusal in evidence.refusals:
        yield f"refused: {refusal.candidate}: {with_flags(refusal.reason)}"
    for warning in evidence.warnings:
        yield f"warning: {with_flags(warning)}"
