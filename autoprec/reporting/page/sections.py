"""A report: its sections, each made from a profile alone and empty if that has nothing to say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from autoprec.core.device.roofline import limit_text
from autoprec.core.dtypes import Policy
from autoprec.core.number_words import percent, rate_number
from autoprec.core.numerics.watching import WatchedStep
from autoprec.core.profile import Baseline, Chosen, Profile, TriedRecipe
from autoprec.core.speed.trial_results import Status
from autoprec.reporting.flags import with_flags
from autoprec.reporting.page import charts
from autoprec.reporting.page.markup import (
    facts,
    figure,
    listed,
    number,
    section,
    shown,
    table,
    tag,
    text,
)
from autoprec.reporting.text import bytes_text, rate_text, seconds_text, status_text
from autoprec.version import __version__


def _headline(profile: Profile) -> str:
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
    device = text(profile.device.name or profile.device.family)
    lines = [
        tag("p", f"{text(profile.task.file)} on {device}", class_="task"),
        tag("h1", lead),
        tag("p", answer, class_="answer"),
        tag("p", larger_batch) if larger_batch else "",
        tag("p", verdict),
    ]
    return tag("header", "\n".join(filter(None, lines)))


def _warnings(profile: Profile) -> str:
    return section("Warnings", listed(text(with_flags(each)) for each in profile.evidence.warnings))


def _throughput(profile: Profile) -> str:
    drawn = charts.throughput(profile.evidence.tried, profile.recipe)
    caption = (
        "Every recipe of the search by one short timing; a line joins the fastest of each policy, "
        "the ring is what was chosen, crosses did not run."
    )
    return section("Throughput over the batch", figure(drawn, caption))


def _gain(profile: Profile) -> str:
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


def _numerics(profile: Profile) -> str:
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


def _loss_scale(profile: Profile) -> str:
    scale = profile.recipe.loss_scale
    if scale is None:
        return ""
    measured = profile.evidence.loss_scale
    drawn = "" if measured is None else charts.gradient_exponents(measured, scale.initial)
    rows = [
        ("mode", text(scale.mode)),
        ("initial scale", shown(scale.initial, "{:g}".format)),
        ("growth interval", shown(scale.growth_interval, str)),
        ("floor", shown(scale.floor, "{:g}".format)),
        ("note", text("" if measured is None else measured.note)),
    ]
    return section("Loss scale", figure(drawn, "Powers of two, logarithmic."), facts(rows))


def _islands(profile: Profile) -> str:
    modules = profile.recipe.float32_modules
    if not modules:
        return ""
    evidence = profile.evidence.islands
    values = {} if evidence is None else vars(evidence)
    rows = [(name.replace("_", " "), _value(value)) for name, value in values.items()]
    names = listed(f"<code>{text(path or 'the root')}</code>" for path in modules)
    return section("Modules that stay in float32", names, facts(rows))


def _limits(profile: Profile) -> str:
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
        ("compilation pays off", shown(chosen.break_even_steps, "after {} steps".format)),
        ("waiting for other ranks", _waiting(chosen)),
        ("the same in the baseline", _waiting(base)),
    ]
    return section("What limits a step", facts(rows))


def _waiting(side: Chosen | Baseline) -> str:
    waiting = side.exposed_communication
    return "" if waiting is None else waiting.as_share(number)


def _share_bar(value: float | None) -> str:
    """Show a share of a limit as a bar and in per cent."""
    if value is None:
        return ""
    full = min(100.0, 100 * value)
    bar = f'<span class="meter"><span style="width:{full:.1f}%"></span></span>'
    return f"{bar} {number(value, f'{value:.0%}')}"


def _trials(profile: Profile) -> str:
    """Tabulate all trials, the fastest first, and those that failed with their reasons."""
    evidence = profile.evidence
    ordered = sorted(evidence.tried, key=lambda each: -each.samples_per_second)
    rows = [_trial(each) for each in ordered]
    head = ["policy", "batch", "settings", "samples/s", ""]
    seconds = shown(evidence.tuning_seconds, seconds_text)
    spent = f"{shown(evidence.trials, str)} trials in {seconds}"
    if evidence.proof_seconds:
        spent += f", of which {shown(evidence.proof_seconds, seconds_text)} for checks"
    return section("All trials", tag("p", f"{spent}."), table(head, rows, numbers=(1, 3)))


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


def _refusals(profile: Profile) -> str:
    ruled_out = profile.evidence.refusals
    rows = [[text(each.candidate), text(with_flags(each.reason))] for each in ruled_out]
    return section("Ruled out", table(["what", "why"], rows))


def _origin(profile: Profile) -> str:
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


def _checks(watched: Sequence[WatchedStep]) -> str:
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


def _comparison(profiles: Mapping[str, Profile]) -> str:
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


class Page(str):
    """HTML text of a whole page. A notebook shows it in a frame, so that styles do not mix."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(self)}" style="width:100%;height:50rem;border:0"></iframe>'


def page_of(profile: Profile, written: str, watched: Sequence[WatchedStep] = ()) -> Page:
    """Return the report of a profile; `written` is its recipe as YAML.

    `watched` are the checks of a training under it.
    """
    recipe = section("The recipe", f"<pre><code>{text(written)}</code></pre>")
    parts = [_headline(profile), _checks(watched), *(make(profile) for make in _SECTIONS), recipe]
    return _document(profile.task.file, parts)


_SECTIONS = (
    *(_warnings, _gain, _throughput, _numerics, _loss_scale, _islands, _limits),
    *(_origin, _refusals, _trials),
)


def page_of_several(profiles: Mapping[str, Profile]) -> Page:
    """Return a page that compares profiles, by their file names."""
    order = sorted(profiles, key=lambda name: (profiles[name].task.file, name))
    compared = _comparison({name: profiles[name] for name in order})
    return _document("profiles", ["<header><h1>Profiles</h1></header>", compared])


def style() -> str:
    """Return the page's style, for light, dark and print: CSS."""
    return Path(__file__).with_name("style.css").read_text(encoding="utf-8")


def _document(title: str, parts: Iterable[str]) -> Page:
    body = "\n".join(part for part in parts if part)
    return Page(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}: autoprec</title>\n<style>\n{style()}</style>\n</head>\n<body>\n"
        f"{body}\n<footer>Made by autoprec {__version__} from the profile alone.</footer>\n"
        "</body>\n</html>\n"
    )
