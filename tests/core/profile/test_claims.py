"""Which claims of a profile still hold, by what was found now."""

from __future__ import annotations

import pytest

from autoprec.core.numerics.verdict import Verdict
from autoprec.core.profile.claims import (
    CHANGE_SHARE,
    Claim,
    Verification,
    judge_numerics,
    judge_speedup,
)
from autoprec.core.ratio import Ratio

STATED = Ratio(2.0, 1.9, 2.1, 6)
LEAST = 1.9 * (1 - CHANGE_SHARE)


@pytest.mark.parametrize(
    ("found", "result"),
    [
        (Ratio(2.0, 1.9, 2.1, 6), "holds"),
        (Ratio(2.6, 2.5, 2.7, 6), "holds"),
        (Ratio(LEAST, LEAST - 0.1, LEAST + 0.1, 6), "holds"),
        (Ratio(LEAST - 0.01, LEAST - 0.1, LEAST, 6), "unresolved"),
        (Ratio(LEAST - 0.1, LEAST - 0.2, LEAST - 0.01, 6), "fails"),
        (Ratio(0.7 * 2.0, 0.7 * 1.9, 0.7 * 2.1, 6), "fails"),
        (Ratio(1.0, 0.98, 1.02, 6), "fails"),
    ],
)
def test_a_speedup_fails_where_the_whole_interval_is_clearly_below_the_stated(
    found: Ratio, result: str
) -> None:
    assert judge_speedup(STATED, found) == result


def test_a_ratio_doubled_by_hand_fails_with_its_interval_or_without() -> None:
    honest = Ratio(1.5, 1.4, 1.6, 6)
    assert judge_speedup(honest, honest) == "holds"
    assert judge_speedup(Ratio(3.0, 1.4, 1.6, 6), honest) == "fails"
    assert judge_speedup(Ratio(3.0, 2.8, 3.2, 6), honest) == "fails"


@pytest.mark.parametrize(
    ("stated", "found", "result"),
    [
        ("equal", "equal", "holds"),
        ("equal", "drift", "fails"),
        ("equal", "rejected", "fails"),
        ("equal", "unproven", "unresolved"),
        ("equal", "equal at single steps", "fails"),
        ("drift", "drift", "holds"),
        ("drift", "equal", "holds"),
        ("drift", "rejected", "fails"),
        ("equal at single steps", "equal", "holds"),
        ("unproven", "rejected", "holds"),
    ],
)
def test_a_verdict_holds_where_the_new_one_is_no_worse(
    stated: str, found: str, result: str
) -> None:
    made = [Verdict(each, "because") for each in (stated, found)]  # type: ignore[arg-type]
    assert judge_numerics(*made) == result


def test_a_verification_holds_unless_a_claim_fails() -> None:
    claims = [Claim("speed-up", result, "2x", "2x") for result in ("holds", "unresolved", "fails")]
    assert Verification(tuple(claims[:2])).holds
    failing = Verification(tuple(claims))
    assert not failing.holds
    assert failing.failed == (claims[2],)
