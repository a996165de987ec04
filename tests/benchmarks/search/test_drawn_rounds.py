"""What final rounds cost on drawn noise, and whether what they tell holds."""

from __future__ import annotations

import pytest

from benchmarks.search.rounds import confirm, main

COUNT = 60


@pytest.mark.parametrize("noise", [(0.01, 0.03), (0.025, 0.05)])
def test_turns_that_end_early_save_time_and_cost_no_truth(noise: tuple[float, float]) -> None:
    early, full = (
        [confirm(1.6, noise, seed, all_turns=all_turns) for seed in range(COUNT)]
        for all_turns in (False, True)
    )
    assert sum(each.seconds for each in early) < 0.9 * sum(each.seconds for each in full)
    assert sum(each.ratio.low <= 1.6 <= each.ratio.high for each in early) >= 0.95 * COUNT


def test_the_table_has_a_row_for_each_gain_and_noise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rounds", "--count", "1"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 6 * 4
    assert lines[-1].startswith("2.90x  8.0% 13.0%")
