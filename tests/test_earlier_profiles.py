"""Profiles that earlier versions wrote load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fuzz.example import FULL

from autoprec.core.numerics.island_proposals import IslandsEvidence
from autoprec.core.numerics.loss_scale_choice import ScaleEvidence
from autoprec.core.profile import NOT_COMPARED, MisalignedDimension
from autoprec.core.ratio import Ratio
from autoprec.errors import ProfileError
from autoprec.profiles import parse_profile, to_mapping

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
WHOLE = {"ratio": 3.0, "low": 2.9, "high": 3.1, "rounds": 6}
ALIKE = {"ratio": 1.5, "low": 1.4, "high": 1.6, "rounds": 6}


def of_schema(schema, batch_size, **ratios):
    """A profile of schema 1 or 2, whose baseline has batch 512."""
    document = to_mapping(FULL)
    recipe = {**document["recipe"], "batch_size": batch_size}
    evidence = {k: v for k, v in document["evidence"].items() if k != "speedup"}
    return {**document, "schema": schema, "recipe": recipe, "evidence": evidence | ratios}


def test_a_recorded_tuning_of_schema_1_is_read_for_what_its_ratios_meant():
    """On an H200 at batch 4096: 66.2x the samples/s of batch 32, 1.93x over float32 alike."""
    row = json.loads((RESULTS / "gpu_tune-encoder-2026-11-26-nvidia-h200.jsonl").read_text())
    written = {"recipe": row["recipe"], "evidence": row["evidence"]}
    assert written["evidence"]["speedup"]["ratio"] == 66.1906
    profile = parse_profile({**to_mapping(FULL), "schema": 1, **written}, "a")
    assert profile.evidence.speedup.ratio == 1.9344
    assert profile.evidence.throughput.ratio == 66.1906
    assert profile.describe_gains().startswith(
        "1.93x (1.93-1.94, 3 rounds) over float32, batch 4096; 66.19x (61.88-68.49, 3 rounds) the "
        "samples/s of float32, batch 32"
    )
    assert parse_profile(to_mapping(profile), "a") == profile


@pytest.mark.parametrize("schema", [1, 2])
def test_at_the_batch_of_the_baseline_the_old_ratio_was_the_speedup(schema):
    old = of_schema(schema, 256, speedup=WHOLE, speedup_same_batch=ALIKE)
    evidence = parse_profile(old, "a").evidence  # 256 twice
    assert (evidence.speedup, evidence.throughput) == (Ratio(**WHOLE), None)


def test_where_float32_at_the_same_batch_was_not_timed_only_the_throughput_is_known():
    evidence = parse_profile(of_schema(1, 8, speedup=WHOLE), "a").evidence
    assert (evidence.speedup, evidence.throughput) == (NOT_COMPARED, Ratio(**WHOLE))


def test_an_old_profile_of_the_baseline_claims_nothing():
    evidence = parse_profile(of_schema(1, 8), "a").evidence
    assert (evidence.speedup, evidence.throughput) == (NOT_COMPARED, None)


@pytest.mark.parametrize(
    ("schema", "ratios", "message"),
    [
        (1, {"speedup": {**WHOLE, "low": -1.0}}, r"evidence\.speedup\.low: -1\.0 given"),
        (2, {"speedup_same_batch": 2}, r"evidence\.speedup_same_batch: 2 given"),
        (3, {"speedup_same_batch": ALIKE}, r"evidence\.speedup_same_batch: unknown key"),
    ],
)
def test_a_wrong_ratio_is_told_by_the_name_it_has_in_the_file(schema, ratios, message):
    with pytest.raises(ProfileError, match=message):
        parse_profile(of_schema(schema, 8, **ratios), "a")


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
