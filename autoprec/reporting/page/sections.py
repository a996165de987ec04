"""The sections of a report, each made from a profile alone; empty if that has nothing to say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoprec.core.device.roofline import limit_text
from autoprec.core.dtypes import Policy
from autoprec.core.number_words import percent, rate_number
from autoprec.core.numerics.watching import WatchedStep
from autoprec.core.profile import Profile, TriedRecipe
from autoprec.core.speed.trial_results import Status
from autoprec.reporting.flags import with_flags
from autoprec.reporting.page import charts
from autoprec.reporting.page.markup import (
    facts,
    figure,
    listed,
    number,
    paragraph,
    section,
    shown,
    table,
    text,
)
from autoprec.reporting.text import (
    bytes_text,
    rate_text,
    seconds_text,
    status_text,
)


def headline(profile: Profile) -> str:
    """Say what came out: the recipe, how much faster, whether it trains like float32."""
    evidence, recipe = profile.evidence, profile.recipe
    gains = [f"{each.ratio.in_words(show=number)} {text(each.over)}" for each in profile.gains()]
    lead = text(profile.describe_recipe())
    if profile.device.fingerprint.rehearsal:
        answer = "a rehearsal on a pretended device: no time means anything"
    elif evidence.inconclusive:
        answer = f"inconclusive: {text(evidence.inconclusive)}"
    elif gains:
        answer = gains[0]
    else:
        kept = "the model is kept as it is" if evidence.baseline.weights_in else "float32 is kept"
        answer = kept if recipe.policy is Policy.FLOAT32 else "not compared"
    larger_batch = "" if evidence.inconclusive else "".join(gains[1:])
    verdict = f"<strong>{text(evidence.parity.verdict)}</strong>: {text(evidence.parity.reason)}"
    return (
        f"<header><p class=task>{text(profile.task.file)} on "
        f"{text(profile.device.name or profile.device.family)}</p>\n"
        f"<h1>{lead}</h1>\n<p class=answer>{answer}</p>\n"
        f"{paragraph(larger_batch)}{paragraph(verdict)}</header>"
    )


def warnings(profile: Profile) -> str:
    """List the warnings."""
    return section("Warnings", listed(text(with_flags(each)) for each in profile.evidence.warnings))


def throughput(profile: Profile) -> str:
    """Draw throughput over the batch."""
    drawn = charts.throughput(profile.evidence.tried, profile.recipe)
    caption = (
        "Every recipe of the search by one short timing; a line joins the fastest of each policy, "
        "the ring is what was chosen, crosses did not run."
    )
    return section("Throughput over the batch", figure(drawn, caption))


def gain(profile: Profile) -> str:
    """Draw and list where the speed-up comes from."""
    evidence = profile.evidence
    if not evidence.waterfall or evidence.inconclusive:
        return ""
    rows = [
        [text(part.what), part.speedup.in_words(show=number), text(part.against)]
        for part in evidence.waterfall
    ]
    drawn = charts.waterfall(evidence.waterfall, evidence.over_baseline)
    caption = (
        "One thing after another switched off, timed in alternation; the parts multiply to the "
        "whole. Lines are 95 % intervals."
    )
    return section(
        "Where the gain comes from",
        figure(drawn, caption),
        table(["part", "faster by", "than"], rows),
    )


def numerics(profile: Profile) -> str:
    """Draw the loss curves and give the numbers of the verdict."""
    parity = profile.evidence.parity
    drawn = "" if parity.curves is None else charts.losses(parity.curves, profile.recipe.policy)
    caption = "Mean loss over stretches of steps, from the same start with the same data."
    measured = [
        ("loss at the same weights, off by", parity.loss_deviation),
        ("the same for float32 with noise", parity.loss_null),
        ("gradient at the same weights, off by", parity.gradient_error),
        ("the same for float32 with noise", parity.gradient_null),
        ("loss after training, off by", parity.trajectory_deviation),
    ]
    rows = [
        *((name, shown(value, percent)) for name, value in measured),
        ("steps followed", shown(parity.steps or None, str)),
        ("evaluate(model)", shown(parity.metric, "{:.4g}".format)),
        ("evaluate(model) in float32", shown(parity.metric_reference, "{:.4g}".format)),
    ]
    rows += [("compared", text(each)) for each in parity.covered]
    rows += [("not covered", text(each)) for each in parity.not_covered]
    return section("Does it train like float32?", figure(drawn, caption), facts(rows))


def loss_scale(profile: Profile) -> str:
    """Draw where gradients lie in float16, and give the loss scale."""
    scale = profile.recipe.loss_scale
    if scale is None:
        return ""
    found = profile.evidence.loss_scale
    drawn = "" if found is None else charts.gradient_exponents(found, scale.initial)
    rows = [
        ("mode", text(scale.mode)),
        ("initial scale", shown(scale.initial, "{:g}".format)),
        ("growth interval", shown(scale.growth_interval, str)),
        ("floor", shown(scale.floor, "{:g}".format)),
        ("note", text("" if found is None else found.note)),
    ]
    return section("Loss scale", figure(drawn, "Powers of two, logarithmic."), facts(rows))


def islands(profile: Profile) -> str:
    """List the modules that stay in float32."""
    modules = profile.recipe.float32_modules
    if not modules:
        return ""
    found = profile.evidence.islands
    values = {} if found is None else vars(found)
    rows = [(name.replace("_", " "), _value(value)) for name, value in values.items()]
    names = listed(f"<code>{text(path or 'the root')}</code>" for path in modules)
    return section("Modules that stay in float32", names, facts(rows))


def limits(profile: Profile) -> str:
    """Say what limits a step, and how near the device's own limits it is."""
    chosen, base = profile.evidence.chosen, profile.evidence.baseline
    if not chosen.step_seconds:
        return ""
    peak, memory = chosen.peak_share, chosen.memory_share
    rows = [
        ("limited by", text(limit_text(chosen.bound, peak, memory))),
        ("throughput", shown(chosen.samples_per_second, rate_text)),
        ("step", shown(chosen.step_seconds, seconds_text)),
        ("step of the baseline", shown(base.step_seconds, seconds_text)),
        ("of the measured peak", _share_bar(peak)),
        ("of the memory bandwidth, at least", _share_bar(memory)),
        ("loader, for a step", shown(chosen.data_seconds, seconds_text)),
        ("peak memory", shown(chosen.peak_memory_bytes, bytes_text)),
        ("peak memory of the baseline", shown(base.peak_memory_bytes, bytes_text)),
    ]
    rows.append(("compilation pays off", shown(chosen.break_even_steps, "after {} steps".format)))
    for name, waiting in (
        ("waiting for other ranks", chosen.exposed_communication),
        ("the same in the baseline", base.exposed_communication),
    ):
        rows.append((name, "" if waiting is None else waiting.as_share(number)))
    return section("What limits a step", facts(rows))


def _share_bar(value: float | None) -> str:
    """Show a share of a limit as a bar and in per cent."""
    if value is None:
        return ""
    full = min(100.0, 100 * value)
    bar = f'<span class="meter"><span style="width:{full:.1f}%"></span></span>'
    return f"{bar} {number(value, f'{value:.0%}')}"


def trials(profile: Profile) -> str:
    """Tabulate all trials, the fastest first, and those that failed with their reasons."""
    tried = profile.evidence.tried
    ordered = sorted(tried, key=lambda each: -each.samples_per_second)
    rows = [_trial(each) for each in ordered]
    head = ["policy", "batch", "settings", "samples/s", ""]
    evidence = profile.evidence
    seconds = shown(evidence.tuning_seconds, seconds_text)
    spent = f"{shown(evidence.trials, str)} trials in {seconds}"
    if evidence.proof_seconds:
        spent += f", of which {shown(evidence.proof_seconds, seconds_text)} for proofs"
    return section("All trials", paragraph(f"{spent}."), table(head, rows, numbers=(1, 3)))


def _trial(each: TriedRecipe) -> list[str]:
    rate = each.samples_per_second
    failed = "" if each.status is Status.OK else f"{status_text(each.status)}: {each.reason}"
    return [
        f'<span class="key {each.policy.value}"></span>{text(each.policy)}',
        shown(each.batch_size, str),
        text(each.settings),
        shown(rate or None, rate_number),
        text(failed),
    ]


def refusals(profile: Profile) -> str:
    """Tabulate what was ruled out, and why."""
    rows = [[text(each.candidate), text(each.reason)] for each in profile.evidence.refusals]
    return section("Ruled out", table(["what", "why"], rows))


def origin(profile: Profile) -> str:
    """Say what the profile holds for: device, software, task, date."""
    mark, task = profile.device.fingerprint, profile.task
    rows = [
        ("device", text(f"{profile.device.name} ({profile.device.family})")),
        ("memory", shown(mark.memory_gib or None, "{} GiB".format)),
        ("tuned", text(profile.created)),
        ("autoprec", text(profile.autoprec)),
        *((text(name), text(version)) for name, version in profile.software.items()),
        ("task", f"{text(task.file)}, sha256 <code>{text(task.sha256[:16])}</code>"),
    ]
    if profile.evidence.checkpoint is not None:
        rows.append(("started from", text(profile.evidence.checkpoint.file)))
    return section("What it holds for", facts(rows))


def recipe(written: str) -> str:
    """Show the recipe as the file has it."""
    return section("The recipe", f"<pre><code>{text(written)}</code></pre>")


def checks(watched: Sequence[WatchedStep]) -> str:
    """Tabulate the checks during a training."""
    rows = [
        [
            number(each.updates, str(each.updates)),
            *("" if v is None else number(v, percent(v)) for v in _away(each)),
            text("; ".join(filter(None, (each.problem, each.action, each.not_checked)))),
        ]
        for each in watched
    ]
    head = ["update", "outputs", "loss", "gradient", "vanished", "found"]
    return section("Checks during training", table(head, rows, numbers=(0, 1, 2, 3, 4)))


def _away(check: WatchedStep) -> tuple[float | None, ...]:
    known = (check.outputs, check.loss, check.gradient, check.vanished)
    return known if check.samples else (None,) * len(known)


def all_of(profile: Profile, written: str, watched: Sequence[WatchedStep] = ()) -> Iterator[str]:
    """Yield the sections in their order; `written` is the recipe as YAML."""
    yield headline(profile)
    yield checks(watched)
    for make in (
        warnings,
        gain,
        throughput,
        numerics,
        loss_scale,
        islands,
        limits,
        origin,
        refusals,
        trials,
    ):
        yield make(profile)
    yield recipe(written)


def comparison(profiles: Mapping[str, Profile]) -> str:
    """Tabulate several profiles, one a row: device, recipe, speed-up, verdict."""
    rows = []
    for name, profile in profiles.items():
        evidence = profile.evidence
        larger = evidence.throughput
        rate = evidence.chosen.samples_per_second
        rows.append(
            [
                text(profile.device.name or profile.device.family),
                text(profile.task.file),
                text(profile.describe_recipe()),
                evidence.speedup.in_words(show=number) if evidence.speedup.rounds else "",
                larger.in_words(show=number) if larger is not None else "",
                shown(rate or None, rate_text),
                text("inconclusive" if evidence.inconclusive else evidence.parity.verdict),
                text(profile.created[:10]),
                f"<code>{text(name)}</code>",
            ]
        )
    head = ["device", "task", "recipe", "speed-up", "with its batch", "samples/s"]
    return section("Profiles by device", table([*head, "trains", "tuned", "file"], rows))


def _value(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value, f"{value:.4g}")
    return text(value)
