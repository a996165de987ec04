"""The report: complete, true to the profile, and harmless whoever wrote the profile."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec import report
from autoprec.core.codec import to_plain
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.loss_curves import LossCurves
from autoprec.core.numerics.loss_scale_choice import ScaleEvidence
from autoprec.core.numerics.watching import WatchedStep
from autoprec.core.profile import Profile, TriedRecipe
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Distributed, LossScale, Recipe
from autoprec.core.recipe_words import describe_settings
from autoprec.core.speed.attribution import Part
from autoprec.core.speed.trial_results import Status
from autoprec.errors import UsageError
from autoprec.profiles import save_profile
from autoprec.reporting.page.charts import labelled
from tests.fuzz.example import FULL, PLAIN_FLOAT32
from tests.reporting.page.reading import Reader, numbers_in

TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "section", "footer", "h1", "h2"),
    *("p", "strong", "code", "pre", "ul", "li", "table", "thead", "tbody", "tr", "th", "td"),
    *("div", "span", "data", "figure", "figcaption"),
    *("svg", "line", "text", "rect", "circle", "path", "polyline"),
}
NAMES = {
    *("lang", "charset", "name", "content", "class", "value", "style", "role", "aria-label"),
    *("viewbox", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "d", "points"),
    *("width", "height", "text-anchor", "transform"),
}
WINNER = Recipe(Policy.MIXED_FLOAT16, 64, loss_scale=LossScale(initial=1024.0))
SCALE = ScaleEvidence(10, 14, 2, -30, 0.0, note="as measured")
TRIED = (
    *(TriedRecipe(Policy.FLOAT32, n, "", Status.OK, 90.0 + n) for n in (16, 32, 64)),
    *(TriedRecipe(Policy.MIXED_FLOAT16, n, "", Status.OK, 200.0 + n) for n in (32, 64)),
    TriedRecipe(Policy.FLOAT32, 128, "compiled", Status.OUT_OF_MEMORY, 0.0, "needs 9 GiB"),
    TriedRecipe(Policy.MIXED_FLOAT16, 128, "", Status.CRASHED, 0.0, "segmentation fault"),
)


def won(**evidence: Any) -> Profile:
    """A profile with every section."""
    known: dict[str, Any] = {
        "inconclusive": "",
        "tried": TRIED,
        "speedup": Ratio(1.8, 1.7, 1.9, 9),
        "throughput": Ratio(2.0, 1.9, 2.1, 9),
        "waterfall": (
            Part("precision", Ratio(1.5, 1.4, 1.6, 6), "float32, batch 64"),
            Part("batch", Ratio(1.4, 1.3, 1.5, 6), "float32, batch 32"),
        ),
        "loss_scale": SCALE,
        "parity": replace(
            FULL.evidence.parity,
            curves=LossCurves((9, 19, 29), (2.0, 1.5, 1.2), (2.0, 1.6, 1.2), (2.0, 1.5)),
        ),
    }
    return replace(FULL, recipe=WINNER, evidence=replace(FULL.evidence, **{**known, **evidence}))


PROFILES = {"full": FULL, "float32": PLAIN_FLOAT32, "won": won()}


@pytest.mark.parametrize("name", PROFILES)
def test_every_number_is_the_profiles_own(name: str) -> None:
    read = Reader(report(PROFILES[name]))
    assert len(read.numbers) > 8
    assert set(read.numbers) <= set(numbers_in(to_plain(PROFILES[name])))


def test_checks_during_training_are_listed() -> None:
    checks = (
        WatchedStep(1, 8, 8, 0.01, None, 0.03, 0.0),
        WatchedStep(9, 8, 8, 0.5, -0.1, 0.9, 0.1, "its outputs are <far> away", ("a",), "warn"),
    )
    page = report(won(), watched=checks)
    assert "Checks during training" in page
    assert "its outputs are &lt;far&gt; away; warn" in page
    assert set(Reader(page).numbers) >= {0.01, 0.03, 0.5, -0.1, 0.9}
    assert "Checks during training" not in report(won())


def test_checks_are_those_of_one_profile(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="`watched` given with 2 profiles"):
        report([saved(tmp_path, n) for n in "ab"], watched=(WatchedStep(1),))


def saved(folder: Path, name: str) -> Path:
    path = folder / f"{name}.profile.yaml"
    save_profile(won(), path)
    return path


def test_a_page_loads_nothing_runs_nothing_and_is_small() -> None:
    page = report(won())
    assert "<script" not in page
    assert "http" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert len(page.encode()) < 300_000
    read = Reader(page)
    assert read.tags <= TAGS
    assert {name for name, _ in read.attributes} <= NAMES


def test_three_hundred_trials_still_fit() -> None:
    many = tuple(
        TriedRecipe(Policy.FLOAT32, 8 + n, "a, b, c=4", Status.OK, 100.0 + n) for n in range(300)
    )
    assert len(report(won(tried=many)).encode()) < 300_000


EVIL = "'\"><script>alert(1)</script><img src=x onerror=alert(1)>&lt;\x1b[31m</svg></style>"


def with_evil(value: Any, name: str = "") -> Any:
    """Put markup wherever a profile holds free text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = {"policy", "kind", "mode", "engine", "memory_format", "status", "verdict", "knobs"}
        return replace(
            value,
            **{
                f.name: with_evil(getattr(value, f.name), f.name)
                for f in dataclasses.fields(value)
                if f.init and f.name not in kept
            },
        )
    if isinstance(value, tuple):
        return tuple(with_evil(item) for item in value)
    if isinstance(value, dict):
        return {EVIL if name == "software" else key: with_evil(v) for key, v in value.items()}
    return EVIL if type(value) is str else value


@pytest.mark.parametrize("name", PROFILES)
def test_nothing_in_a_profile_becomes_markup(name: str) -> None:
    evil = with_evil(PROFILES[name])
    for page in (report(evil), report(evil)._repr_html_()):
        read = Reader(page)
        assert read.tags <= TAGS | {"iframe"}
        assert {each for each, _ in read.attributes} <= NAMES | {"srcdoc"}
        assert "\x1b" not in page
    read = Reader(report(evil))
    assert "<script>alert(1)</script>" in read.text  # shown, as text
    styles = {value for attribute, value in read.attributes if attribute == "style"}
    assert all(re.fullmatch(r"width:[\d.]+%", style) for style in styles)


def test_what_a_profile_does_not_hold_is_left_out() -> None:
    assert Reader(report(PLAIN_FLOAT32)).headings == [
        "What limits a step",
        "What it holds for",
        "All trials",
        "The recipe",
    ]
    assert Reader(report(won())).headings == [
        "Warnings",
        "Where the gain comes from",
        "Throughput over the batch",
        "Does it train like float32?",
        "Loss scale",
        "What limits a step",
        "What it holds for",
        "Ruled out",
        "All trials",
        "The recipe",
    ]


@pytest.mark.parametrize(
    ("bound", "peak", "memory", "said"),
    [
        ("arithmetic", 0.6, 0.05, "limited by arithmetic"),
        ("memory", 0.17, 0.05, "limited by unknown: neither arithmetic (17% of the peak) nor"),
        ("unknown", 0.17, None, "limited by unknown: arithmetic (17% of the peak) does not"),
    ],
)
def test_what_limits_a_step_explains_half_of_it(
    bound: str, peak: float | None, memory: float | None, said: str
) -> None:
    chosen = replace(
        FULL.evidence.chosen, bound=bound, peak_share=peak, memory_share=memory, step_seconds=0.1
    )
    assert said in " ".join(Reader(report(won(chosen=chosen))).text.split())


def test_the_headline_says_how_much_over_what_and_whether_it_is_known() -> None:
    text = Reader(report(won())).text
    alike, whole = (
        "1.80x (1.70-1.90, 9 rounds) over float32, batch 64",
        "2.00x (1.90-2.10, 9 rounds) the samples/s of float32, batch 512",
    )
    assert text.index(alike) < text.index(whole)
    assert "equal: trains like float32" in text
    assert "inconclusive: the search saw 13.76x" in Reader(report(FULL)).text
    assert "float32 is kept" in Reader(report(PLAIN_FLOAT32)).text


def test_the_headline_of_a_model_in_16_bits_compares_with_no_float32() -> None:
    profile = won()
    base = replace(profile.evidence.baseline, weights_in="bfloat16")
    text = Reader(report(won(baseline=base))).text
    assert "over the model as it is, in bfloat16, batch 64" in text
    assert "the samples/s of the model as it is, in bfloat16, batch 512" in text
    plain = replace(PLAIN_FLOAT32.evidence, baseline=base)
    said = Reader(report(replace(PLAIN_FLOAT32, evidence=plain))).text
    assert "the model is kept as it is" in said


def drawing(page: str, label: str) -> str:
    """The SVG whose description begins so."""
    (found,) = re.findall(rf'<svg [^>]*aria-label="{label}.*?</svg>', page, re.DOTALL)
    return str(found)


def test_throughput_shows_every_recipe_the_chosen_one_and_what_did_not_fit() -> None:
    drawn = drawing(report(won()), "throughput")
    titles = re.findall("<title>(.*?)</title>", drawn)
    assert sum("samples/s" in each and "chosen" not in each for each in titles) == 5
    assert [each for each in titles if each.startswith("chosen: mixed_float16, batch 64")]
    assert "float32, batch 128, compiled: out of memory: needs 9 GiB" in titles
    assert "mixed_float16, batch 128: crashed: segmentation fault" in titles
    assert drawn.count(">OOM<") == 1
    assert len(re.findall("<polyline", drawn)) == 2


def test_a_higher_rate_is_drawn_higher_and_a_larger_batch_further_right() -> None:
    drawn = drawing(report(won()), "throughput")
    dots = re.findall(r'cx="([\d.]+)" cy="([\d.]+)" r="3.5" class="float32"', drawn)
    xs, ys = zip(*[(float(x), float(y)) for x, y in dots], strict=True)
    assert sorted(xs) == list(xs)
    assert sorted(ys, reverse=True) == list(ys)


def test_the_loss_curves_are_those_of_the_profile() -> None:
    drawn = drawing(report(won()), "loss")
    lines = re.findall(r'points="(.*?)" class="curve (\w+)"', drawn)
    assert [(kind, len(points.split())) for points, kind in lines] == [
        ("noise", 2),
        ("reference", 3),
        ("candidate", 3),
    ]
    broken = replace(
        FULL.evidence.parity, curves=LossCurves((9, 19, 29), (2.0, 1.0, 0.5), (2.0, None, None))
    )
    drawn = drawing(report(won(parity=broken)), "loss")
    assert re.findall(r'<polyline [^>]*class="curve (\w+)"/>', drawn) == ["reference"]


def test_gradients_are_drawn_where_the_loss_scale_puts_them() -> None:
    page = report(won())
    assert 'aria-label="gradients from 2^-30 to 2^2, loss scale 2^10"' in page
    unknown = replace(SCALE, smallest_gradient=None)
    assert "gradients from" not in report(won(loss_scale=unknown))


def test_ranks_wait_for_each_other_by_a_share() -> None:
    waits = replace(FULL.evidence.chosen, exposed_communication=Ratio(0.21, 0.18, 0.25, 8))
    profile = replace(won(chosen=waits), recipe=replace(WINNER, distributed=Distributed("ddp", 2)))
    assert "waiting for other ranks 21% (18-25)" in Reader(report(profile)).text


@given(
    st.lists(st.floats(0.0, 1e15), min_size=1, max_size=6),
    st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), max_size=6),
    st.tuples(*[st.floats(0.0, 1e9)] * 3),
)
def test_any_numbers_can_be_drawn(
    rates: list[float], found: list[float | None], gain: tuple[float, float, float]
) -> None:
    """Zeros, losses below zero, equal values, and intervals that hold nothing."""
    tried = tuple(
        TriedRecipe(Policy.FLOAT32, 2**index, "", Status.OK, rate)
        for index, rate in enumerate(rates)
    )
    curves = LossCurves(tuple(range(len(found))), tuple(found), tuple(reversed(found)))
    low, ratio, high = sorted(gain)
    speed = Ratio(ratio, low, high, 6)
    profile = won(
        tried=tried,
        parity=replace(FULL.evidence.parity, curves=curves),
        waterfall=(Part("precision", speed, "float32"),),
        speedup=speed,
    )
    page = report(profile)
    assert "nan" not in page
    assert "inf" not in page.replace("info", "")
    assert set(Reader(page).numbers) <= set(numbers_in(to_plain(profile)))


@pytest.mark.parametrize(
    ("ticks", "labels"),
    [
        ([10.835, 10.84, 10.845], ["10.835", "10.84", "10.845"]),
        ([0.0, 100.0, 200.0], ["0", "100", "200"]),
        ([2.0, 2.5], ["2", "2.5"]),
        ([], []),
    ],
)
def test_labels_have_as_many_digits_as_tell_ticks_apart(
    ticks: list[float], labels: list[str]
) -> None:
    assert labelled(ticks) == list(zip(ticks, labels, strict=True))


def test_several_profiles_are_compared_by_device() -> None:
    from autoprec.reporting.page.sections import page_of_several

    read = Reader(page_of_several({"a.yaml": won(), "b.yaml": PLAIN_FLOAT32, "c.yaml": FULL}))
    assert read.headings == ["Profiles by device"]
    assert "a.yaml" in read.text
    assert "inconclusive" in read.text
    assert set(read.numbers) <= {
        *numbers_in(to_plain(won())),
        *numbers_in(to_plain(FULL)),
        *numbers_in(to_plain(PLAIN_FLOAT32)),
    }


def test_the_chosen_recipe_is_found_among_the_tried_by_its_settings() -> None:
    recipe = replace(WINNER, memory_format="channels_last", knobs={"keep_memory": True})
    row = TriedRecipe(
        recipe.policy, recipe.batch_size, describe_settings(recipe.settings), Status.OK, 300.0
    )
    profile = replace(won(tried=(*TRIED, row)), recipe=recipe)
    rings = re.findall('class="ring"><title>(.*?)</title>', report(profile))
    assert rings == ["chosen: mixed_float16, batch 64, channels_last, memory kept: 300 samples/s"]
