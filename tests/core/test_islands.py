"""The search for islands: minimal sets, within its bound, resumable; and the patterns."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.islands import (
    MOST_TRIALS,
    Found,
    Impossible,
    Tried,
    next_islands,
    resolve_patterns,
)
from autoprec.core.measurement import Unit
from autoprec.errors import UsageError


def model(cheap: int = 6, dear: int = 4) -> tuple[Unit, ...]:
    layers = [Unit(f"layers.{i}.linear", "Linear", (i + 1) / 10) for i in range(dear)]
    norms = [Unit(f"layers.{i}.norm", "Norm") for i in range(cheap)]
    return (Unit("", "Model"), Unit("layers", "Stack"), *layers, *norms)


def search(units, passes):
    history: list[Tried] = []
    while True:
        step = next_islands(units, history)
        if isinstance(step, Found | Impossible):
            return step, history
        history.append(Tried(step, passes(frozenset(step))))


@pytest.mark.parametrize("culprit", [unit.path for unit in model()])
def test_a_single_culprit_is_found_alone(culprit):
    found, history = search(model(), lambda s: culprit in s)
    assert found == Found((culprit,))
    assert len(history) <= 9


def test_two_culprits_of_different_cost_are_found_together():
    both = {"layers.3.norm", "layers.1.linear"}
    found, _ = search(model(), lambda s: both <= s)
    assert set(found.paths) == both


def test_cheap_units_are_tried_before_any_matrix_product():
    first = next_islands(model(), ())
    assert not any(path.endswith("linear") for path in first)
    assert first[0] == "layers.0.norm"
    assert first[-1] == ""


def test_a_model_of_matrix_products_only_is_searched_too():
    units = [unit for unit in model() if unit.products]
    found, _ = search(units, lambda s: "layers.2.linear" in s)
    assert found == Found(("layers.2.linear",))


@pytest.mark.parametrize("units", [model(), model(dear=0), ()])
def test_where_not_even_all_units_help_it_is_impossible(units):
    found, history = search(units, lambda s: False)
    assert isinstance(found, Impossible)
    assert len(history) <= 2
    assert "casts by hand" in found.reason


def test_units_without_code_of_their_own_are_never_proposed():
    units = (*model(), Unit("holder", "ModuleList", own_code=False))
    _, history = search(units, lambda s: {"layers.1.linear", "layers.3.norm"} <= s)
    assert len(history) > 2, "cheap units, all units, and some sets of them"
    assert not any("holder" in tried.paths for tried in history)


def test_out_of_trials_the_cheapest_set_that_passed_is_taken():
    units = model(cheap=100)
    needed = {f"layers.{i}.norm" for i in range(0, 100, 9)}
    found, history = search(units, lambda s: needed <= s)
    assert len(history) == MOST_TRIALS
    assert needed <= set(found.paths)
    assert len(found.paths) < 102


def test_out_of_trials_a_set_that_failed_is_never_taken_however_cheap():
    """The search has no trial left only where its first set passed; nothing else did here."""
    history = []
    units = model(cheap=100)
    while isinstance(step := next_islands(units, history), tuple):
        history.append(Tried(step, passed=not history))
    assert len(history) == MOST_TRIALS
    assert min(len(tried.paths) for tried in history) < len(history[0].paths)
    assert step == Found(history[0].paths)


def test_a_history_of_another_model_is_refused():
    with pytest.raises(ValueError, match="was proposed"):
        next_islands(model(), [Tried(("else",), True)])


def test_the_answer_follows_from_history_alone():
    _, history = search(model(), lambda s: "layers.3.norm" in s)
    for index, tried in enumerate(history):
        assert next_islands(model(), history[:index]) == tried.paths


@given(st.integers(0, 70), st.integers(0, 30), st.data())
def test_the_search_stops_within_its_bound_with_a_set_that_passed(cheap, dear, data):
    units = model(cheap, dear)
    paths = [unit.path for unit in units]
    needed = frozenset(data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=4)))
    found, history = search(units, lambda s: needed <= s)
    assert len(history) <= MOST_TRIALS
    assert needed <= set(found.paths)
    assert any(set(t.paths) == set(found.paths) and t.passed for t in history)
    if len(history) < MOST_TRIALS:
        assert set(found.paths) == needed


@given(st.randoms(use_true_random=False))
def test_whatever_the_answers_the_search_ends(random):
    _, history = search(model(40, 20), lambda s: random.random() < 0.5)
    assert len(history) <= MOST_TRIALS


def test_a_pattern_is_an_exact_path_or_exactly_one_match():
    assert resolve_patterns(["layers.1.norm", "*.3.linear"], model()) == (
        "layers.1.norm",
        "layers.3.linear",
    )
    assert resolve_patterns(["layers.1.norm", "layers.1.n*"], model()) == ("layers.1.norm",)


def test_an_exact_path_wins_over_the_pattern_it_could_be():
    units = (Unit("a?", "A"), Unit("ab", "B"))
    assert resolve_patterns(["a?"], units) == ("a?",)


def test_two_matches_are_an_error_that_names_them():
    with pytest.raises(UsageError, match=r"matches 4 modules.*expected exactly one"):
        resolve_patterns(["*.linear"], model())
    with pytest.raises(UsageError, match=r", \.\.\.\)"):
        resolve_patterns(["layers.*"], model())


def test_no_match_is_an_error_with_the_nearest_names():
    with pytest.raises(UsageError, match=r"matches no module.*Did you mean layers\.1\.norm"):
        resolve_patterns(["layers.1.nrm"], model())
    with pytest.raises(UsageError) as caught:
        resolve_patterns(["zzz"], (Unit("a", "A"),))
    assert "Did you mean" not in str(caught.value)


@given(st.integers(0, 4), st.integers(0, 3), st.data())
def test_the_answer_is_one_of_the_minimal_sets_that_brute_force_finds(cheap, dear, data):
    units = model(cheap, dear)
    paths = [unit.path for unit in units]
    ways = st.sets(st.sampled_from(paths), min_size=1, max_size=3).map(frozenset)
    enough = data.draw(st.lists(ways, min_size=1, max_size=3))

    def passes(chosen) -> bool:
        return any(way <= set(chosen) for way in enough)

    subsets = [frozenset(s) for n in range(len(paths) + 1) for s in combinations(paths, n)]
    passing = {subset for subset in subsets if passes(subset)}
    minimal = {s for s in passing if not any(s - {path} in passing for path in s)}
    found, history = search(units, passes)
    assert passes(found.paths)
    if len(history) < MOST_TRIALS:
        assert frozenset(found.paths) in minimal
