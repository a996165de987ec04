"""What a policy cannot run without in float32: follows exceptions, then cost."""

from __future__ import annotations

import pytest

from autoprec.core.measurement import Unit
from autoprec.core.numerics.island_proposals import IslandsFound, NoIslandsHelp
from autoprec.core.numerics.runnable import (
    MAX_ATTEMPTS,
    MAX_SUSPECTS,
    RunAttempt,
    next_attempt,
)

STACK = (
    Unit("", "Net"),
    *(Unit(f"blocks.{i}", "Block") for i in range(6)),
    *(Unit(f"blocks.{i}.linear", "Linear", 0.1) for i in range(6)),
    Unit("norm", "Norm"),
    Unit("holder", "ModuleList", own_code=False),
)


def search(units, outcome):
    """Search with `outcome(paths)`: None where it runs, else the modules that it raises in."""
    history: list[RunAttempt] = []
    while True:
        step = next_attempt(units, history)
        if isinstance(step, IslandsFound | NoIslandsHelp):
            return step, [tried.paths for tried in history]
        raised = outcome(frozenset(step))
        history.append(RunAttempt(step, raised is None, raised or ()))


def test_what_runs_as_it_is_needs_nothing():
    assert search(STACK, lambda kept: None) == (IslandsFound(()), [()])


def test_the_innermost_module_that_raises_is_kept_first():
    found, tried = search(STACK, lambda s: None if "norm" in s else ("norm", "blocks.0", ""))
    assert found == IslandsFound(("norm",))
    assert tried == [(), ("norm",)]


def test_a_module_without_code_of_its_own_or_unknown_is_passed_over():
    raised = ("elsewhere", "holder", "norm")
    found, tried = search(STACK, lambda s: None if "norm" in s else raised)
    assert (found, tried) == (IslandsFound(("norm",)), [(), ("norm",)])


def test_where_the_same_code_raises_on_its_caller_is_kept_and_it_is_not():
    found, tried = search(STACK, lambda s: None if "" in s else ("norm", ""))
    assert found == IslandsFound(("",))
    assert tried == [(), ("norm",), ("norm", ""), ("",)]


def test_two_modules_that_raise_one_after_the_other_are_both_kept():
    def outcome(kept):
        return next(((path,) for path in ("norm", "") if path not in kept), None)

    found, tried = search(STACK, outcome)
    assert found == IslandsFound(("norm", ""))
    assert tried == [(), ("norm",), ("norm", ""), ("",)]


def test_the_second_block_that_raises_takes_the_rest_of_its_class_with_it():
    blocks = [f"blocks.{i}" for i in range(6)]

    def outcome(kept):
        return next(((path,) for path in blocks if path not in kept), None)

    found, tried = search(STACK, outcome)
    assert set(found.paths) == set(blocks)
    assert len(tried) == 4


def test_modules_with_matrix_products_are_kept_one_by_one():
    linears = ["blocks.4.linear", "blocks.1.linear"]

    def outcome(kept):
        return next(((path,) for path in linears if path not in kept), None)

    found, _ = search(STACK, outcome)
    assert found == IslandsFound(tuple(linears))


@pytest.mark.parametrize("culprit", ["norm", "blocks.3", "", "blocks.2.linear"])
def test_an_exception_that_tells_nothing_is_searched_by_cost(culprit):
    found, tried = search(STACK, lambda s: None if culprit in s else ())
    assert found == IslandsFound((culprit,))
    assert not any("linear" in path for path in tried[1])
    assert len(tried) <= MAX_ATTEMPTS


def test_where_nothing_helps_the_reason_says_so():
    found, tried = search(STACK, lambda s: ())
    assert found == NoIslandsHelp("it raises whichever modules are kept in float32")
    assert len(tried) == 3, "none, all without products, all"


def test_exceptions_are_followed_only_so_far_and_then_cost_decides():
    products = [Unit(f"linear{i:02}", "Linear", 0.02) for i in range(40)]
    units = (*products, Unit("norm", "Norm"))

    def outcome(kept):
        raising = next((each.path for each in products if each.path not in kept), "norm")
        return None if "norm" in kept else (raising,)

    found, tried = search(units, outcome)
    assert found == IslandsFound(("norm",))
    assert len(tried) == 1 + MAX_SUSPECTS + 1


def test_a_search_that_does_not_end_takes_the_smallest_set_that_ran():
    units = [Unit(f"norm{i:03}", "Norm") for i in range(400)]
    needed = {f"norm{i:03}" for i in range(0, 400, 37)}
    found, tried = search(units, lambda s: None if needed <= s else ())
    assert len(tried) == MAX_ATTEMPTS
    assert needed <= set(found.paths)
    assert len(found.paths) == min(len(paths) for paths in tried if needed <= set(paths))


def test_a_history_of_another_search_is_an_error():
    with pytest.raises(ValueError, match=r"history tried \('norm',\), but \(\) was proposed"):
        next_attempt(STACK, [RunAttempt(("norm",), ran=True)])
