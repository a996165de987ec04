"""The oracle's rows: shares of the grid's time, and the table's cells."""

from __future__ import annotations

import pytest
from benchmark_rows import row

from benchmarks.search import oracle_rows as rows


def test_the_whole_tuning_is_counted_against_the_grid() -> None:
    one = row()
    assert rows.share(one) == pytest.approx(50 / 200)
    assert rows.share_of_choosing(one) == pytest.approx(18 / 200)
    assert rows.share_of_short(one) == pytest.approx(50 / (1.0 * 40))


def test_a_table_has_the_whole_recipe_and_float32_alike_or_says_that_it_was_not_measured() -> None:
    older = {k: v for k, v in row("lstm").items() if k != "chosen_over_float32_alike"}
    lines = list(rows.table([row(), older]))
    assert "mixed_bfloat16, batch 64, fused_optimizer" in lines[2]
    assert "1.50x (1.49-1.51)" in lines[2]
    assert "not measured" in lines[3]
    assert "chosen/float32 alike not measured" in rows.summary([row(), older])
    assert "chosen/float32 alike 1.50x" in rows.summary([row()])
    assert "fused_optimizer, which the tuner tries too, at the five" in rows.explanation([row()])
