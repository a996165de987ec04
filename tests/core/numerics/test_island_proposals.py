"""The search for islands: minimal sets, within its bound, resumable; and the patterns."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.measurement import Unit
from autoprec.core.numerics.island_proposals import (
    MAX_TRIALS,
    IslandsEvidence,
    IslandsFound,
    IslandTrial,
    NoIslandsHelp,
    needed_islands,
    next_islands,
    resolve_patterns,
)
from autoprec.errors import UsageError


def test_evidence_has_the_digits_that_a_profile_shows() -> None:
    found = IslandsEvidence.of(3, 0.123456, "found", 0.987654)
    assert found == IslandsEvidence("found", 3, 0.1235, 0.9877)
    assert IslandsEvidence.of(3, 0.5, "found").speed_kept == 1.0


def model(cheap: int = 6, dear: int = 4) -> tuple[Unit, ...]:
    layers = [Unit(f"layers.{i}.linear", "Linear", (i + 1) / 10) for i in range(dear)]
    norms = [Unit(f"layers.{i}.norm", "Norm") for i in range(cheap)]
    return (Unit("", "Model"), Unit("layers", "Stack"), *layers, *norms)


def search(units, passes):
    history: list[IslandTrial] = []
    while True:
        step = next_islands(units, history)
        if isinstance(step, IslandsFound | NoIslandsHelp):
            return step, history
        history.append(IslandTrial(step, passes(frozenset(step))))


@pytest.mark.parametrize("culprit", [unit.path for unit in model()])
def test_a_single_culprit_is_found_alone(culprit):
    found, history = search(model(), lambda s: culprit in s)
    assert found == IslandsFound((culprit,))
    assert len(history) <= 9


def test_two_culprits_of_different_cost_are_found_together():
    both = {"layers.3.norm", "layers.1.linear"}
    found, _ = search(model(), lambda s: both <= s)
    assert set(found.paths) == both


def test_a_search_at_once_finds_the_islands_and_none_where_none_help():
    both = {"layers.3.norm", "layers.1.linear"}
    assert set(needed_islands(model(), lambda paths: both <= set(paths))) == both
    assert needed_islands(model(), lambda paths: False) == ()
    assert needed_islands((), lambda paths: True) == ()


def test_cheap_units_are_tried_before_any_matrix_product():
    first = next_islands(model(), ())
    assert not any(path.endswith("linear") for path in first)
    assert first[0] == "layers.0.norm"
    assert first[-1] == ""


def test_a_model_of_matrix_products_only_is_searched_too():
    units = [unit for unit in model() if unit.products]
    found, _ = search(units, lambda s: "layers.2.linear" in s)
    assert found == IslandsFound(("layers.2.linear",))


@pytest.mark.parametrize("units", [model(), model(dear=0), ()])
def test_where_not_even_all_units_help_it_is_impossible(units):
    found, history = search(units, lambda s: False)
    assert found == NoIslandsHelp(
        "no set of float32 modules makes it train like float32: the model casts by hand, or "
        "computes outside of its modules' forward"
    )
    assert len(history) <= 2


@given(st.sets(st.sampled_from([unit.path for unit in model()]), min_size=1, max_size=4))
def test_no_set_names_a_unit_twice(needed):
    _, history = search(model(), lambda s: needed <= s)
    assert all(len(set(tried.paths)) == len(tried.paths) for tried in history)


def test_units_without_code_of_their_own_are_never_proposed():
    units = (*model(), Unit("holder", "ModuleList", own_code=False))
    _, history = search(units, lambda s: {"layers.1.linear", "layers.3.norm"} <= s)
    assert len(history) > 2, "cheap units, all units, and some sets of them"
    assert not any("holder" in tried.paths for tried in history)


def test_out_of_trials_the_cheapest_set_that_passed_is_taken():
    units = model(cheap=100)
    needed = {f"layers.{i}.norm" for i in range(0, 100, 9)}
    found, history = search(units, lambda s: needed <= s)
    assert len(history) == MAX_TRIALS
    assert needed <= set(found.paths)
    assert len(found.paths) < 102


def test_out_of_trials_a_set_that_failed_is_never_taken_however_cheap():
    """The search has no trial left only where its first set passed; nothing else did here."""
    history = []
    units = model(cheap=100)
    while isinstance(step := next_islands(units, history), tuple):
        history.append(IslandTrial(step, passed=not history))
    assert len(history) == MAX_TRIALS
    assert min(len(tried.paths) for tried in history) < len(history[0].paths)
    assert step == IslandsFound(history[0].paths)


def test_out_of_trials_the_set_of_fewest_products_that_passed_is_taken_then_the_smallest():
    """All norms passed with all products, then fewer and fewer products; names do not matter."""
    products = [Unit(f"z{i:03}", "Linear", 0.01 * (i + 1)) for i in range(80)]
    units = (*products, Unit("a", "Norm"), Unit("b", "Norm"))
    found, history = search(units, lambda s: {"z079", "z060", "z040", "z020"} <= s)
    assert len(history) == MAX_TRIALS
    passed = [tried.paths for tried in history if tried.passed]
    work = {unit.path: unit.products for unit in units}
    cost = {paths: (sum(work[path] for path in paths), len(paths)) for paths in passed}
    assert found == IslandsFound(min(passed, key=cost.__getitem__))
    assert found.paths != min(passed)  # by its name another one would be first


def test_all_containers_go_after_all_leaves_and_the_root_last():
    units = (
        Unit("", "M"),
        Unit("a", "Block"),
        Unit("a.b", "Part"),
        Unit("a.b.c", "N"),
        Unit("d", "N"),
    )
    assert next_islands(units, ()) == ("a.b.c", "d", "a", "a.b", "")
    assert next_islands(model(), ())[-2:] == ("layers", "")


def test_a_history_of_another_model_is_refused():
    with pytest.raises(ValueError, match="was proposed"):
        next_islands(model(), [IslandTrial(("else",), True)])


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
    assert len(history) <= MAX_TRIALS
    assert needed <= set(found.paths)
    assert any(set(t.paths) == set(found.paths) and t.passed for t in history)
    if len(history) < MAX_TRIALS:
        assert set(found.paths) == needed


@given(st.randoms(use_true_random=False))
def test_whatever_the_answers_the_search_ends(random):
    _, history = search(model(40, 20), lambda s: random.random() < 0.5)
    assert len(history) <= MAX_TRIALS


def test_a_pattern_is_an_exact_path_or_exactly_one_match():
    assert resolve_patterns(["layers.1.norm", "*.3.linear"], model()) == (
        "layers.1.norm",
        "layers.3.linear",
    )
    assert resolve_patterns(["layers.1.norm", "layers.1.n*"], model()) == ("layers.1.norm",)


def test_an_exact_path_wins_over_the_pattern_it_could_be():
    units = (Unit("a?", "A"), Unit("ab", "B"))
    assert resolve_patterns(["a?"], units) == ("a?",)


def test_two_matches_are_an_error_that_names_four():
    expected = (
        "float32_modules '*.linear' matches 4 modules (layers.0.linear, layers.1.linear, "
        "layers.2.linear, layers.3.linear), expected exactly one; give the exact path, or name each"
    )
    with pytest.raises(UsageError) as caught:
        resolve_patterns(["*.linear"], model())
    assert str(caught.value) == expected
    with pytest.raises(UsageError) as caught:
        resolve_patterns(["*.linear"], model(dear=5))
    more = expected.replace("4 modules", "5 modules").replace("3.linear)", "3.linear, ...)")
    assert str(caught.value) == more


def test_no_match_is_an_error_with_the_nearest_names():
    units = tuple(Unit(f"norm{i}", "Norm") for i in range(5))
    with pytest.raises(UsageError) as caught:
        resolve_patterns(["nrm1"], (Unit("", "M"), *units))
    assert str(caught.value) == (
        "float32_modules 'nrm1' matches no module; the model has norm0, norm1, norm2, norm3, "
        "norm4. Did you mean norm1, norm4, norm3?"
    )


@pytest.mark.parametrize(("count", "shown"), [(8, "abcdefgh"), (9, "abcdefgh")])
def test_no_match_shows_the_first_eight_modules(count, shown):
    units = [Unit(name, "Norm") for name in "abcdefghi"[:count]]
    with pytest.raises(UsageError) as caught:
        resolve_patterns(["zzz"], units)
    more = ", ..." if count > 8 else ""
    assert str(caught.value) == (
        f"float32_modules 'zzz' matches no module; the model has {', '.join(shown)}{more}."
    )


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
    if len(history) < MAX_TRIALS:
        assert frozenset(found.paths) in minimal
