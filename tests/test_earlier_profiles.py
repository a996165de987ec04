"""Profiles that earlier versions wrote load."""

from __future__ import annotations

from fuzz.example import FULL

from autoprec.core.numerics.islands import IslandsEvidence
from autoprec.core.numerics.loss_scale import ScaleEvidence
from autoprec.core.profile import MisalignedDimension
from autoprec.profiles import parse_profile, to_mapping


def test_evidence_that_was_written_in_full_and_in_another_order_loads():
    """As autoprec 0.2 and before wrote it: every key, empty ones too, and islands' reason last."""
    document = to_mapping(FULL)
    written = document["evidence"]
    written["islands"] = {
        "trials": 3,
        "share_of_products_in_float32": 0.0,
        "speed_kept": 0.9871,
        "reason": "trains like float32 with norm kept in float32",
    }
    written["loss_scale"] = {
        "exponent": 13,
        "largest_safe": 17,
        "largest_gradient": -2,
        "smallest_gradient": -61,
        "underflow": 0.0,
        "skipped_steps": 0,
        "steps": 60,
        "trials": 1,
        "batches": 8,
        "note": "",
        "overflow_exponent": None,
        "skips_per_overflow": 0,
        "growth_interval": 2000,
    }
    written["padding"] = [
        {
            "module": "head",
            "kind": "Linear",
            "dimension": "out_features",
            "size": 10,
            "padded_to": 16,
            "speed_with_over_without": None,
        }
    ]
    evidence = parse_profile(document, "a").evidence
    assert evidence.islands == IslandsEvidence(
        "trains like float32 with norm kept in float32", 3, 0.0, 0.9871
    )
    assert evidence.loss_scale == ScaleEvidence(13, 17, -2, -61, 0.0, 0, 60, 1, 8)
    assert evidence.padding == (MisalignedDimension("head", "Linear", "out_features", 10, 16),)
