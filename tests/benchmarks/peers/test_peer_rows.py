"""The peers' tables: three ratios for each rival, and their geometric means."""

from __future__ import annotations

from typing import Any

import pytest
from benchmark_rows import BF16, ratio

from autoprec.core.codec import to_plain
from benchmarks.peers import rows


def side(value: float) -> dict[str, Any]:
    return {"ours": to_plain(BF16), "theirs": to_plain(BF16), "ours_over": ratio(value)}


def peers_row(**comparisons: Any) -> dict[str, Any]:
    found = {"note": "first", "recipe": to_plain(BF16), "seconds": 3.0}
    return {
        "task": "mlp",
        "peers": {"lightning": found, "accelerate": found, "autoprec": found},
        "comparisons": comparisons,
    }


def test_each_of_the_three_ratios_has_its_geometric_mean() -> None:
    first = peers_row(
        chosen={"lightning": side(4.0), "accelerate": side(2.0), rows.ALIKE: side(1.5)},
        fixed={"lightning": side(1.2)},
        knobs={"lightning": side(1.0)},
    )
    second = peers_row(
        chosen={"lightning": side(1.0), "accelerate": {**side(1.0), "failed": "theirs"}},
        fixed={"lightning": side(1.2)},
        knobs={"lightning": side(1.0)},
    )
    del second["comparisons"]["chosen"]["accelerate"]["ours_over"]
    found = rows.means([first, second])
    assert found["chosen"]["lightning"] == pytest.approx(2.0)
    assert found["chosen"]["accelerate"] == pytest.approx(2.0)
    assert found["chosen"][rows.BEST] == pytest.approx(2**0.5)  # 2 and 1; alike is no rival
    assert found["fixed"]["lightning"] == pytest.approx(1.2)
    text = "\n".join(rows.peer_table([first, second]))
    assert "| geometric mean of autoprec over | as chosen | batch fixed | knobs apart |" in text
    assert "| lightning | 2.00x | 1.20x | 1.00x |" in text
    assert (
        "| mlp | accelerate | mixed_bfloat16, batch 64 | 3 s | - | theirs | - | - | first |" in text
    )


def test_a_task_on_which_autoprec_chose_nothing_is_named() -> None:
    lost = peers_row()
    lost["task"], lost["peers"] = "gpt", {**lost["peers"], "autoprec": {"note": "not finished"}}
    won = peers_row(chosen={"lightning": side(4.0)})
    text = "\n".join(rows.peer_table([won, lost]))
    assert "1 won (mlp), 1 lost (gpt), 0 within the noise (none)" in text
    assert "The means leave out gpt, where autoprec chose nothing (not finished)" in text
    assert "while lightning, accelerate chose something" in text
    assert text.index("| gpt | lightning |") < text.index("| mlp | lightning |")
    assert "chose nothing" not in "\n".join(rows.peer_table([won]))
    measured = {**lost, "comparisons": {"chosen": {"lightning": side(0.5)}}}
    text = "\n".join(rows.peer_table([won, measured]))
    assert "1 won (mlp), 1 lost (gpt)" in text
    assert "leave out" not in text
    assert rows.means([won, measured])["chosen"][rows.BEST] == pytest.approx(2**0.5)
    assert rows.in_a_line([won, lost]).endswith("as chosen: gpt nothing chosen, mlp 4.00.")


def test_the_worst_task_and_rival_come_first_and_the_largest_ratio_is_left_out_once() -> None:
    good = peers_row(chosen={"lightning": side(4.0), "accelerate": side(3.0)})
    bad = peers_row(chosen={"lightning": side(2.0), "accelerate": side(0.5)})
    bad["task"] = "lstm"
    lines = [line for line in rows.peer_table([good, bad]) if line.startswith(("| lstm", "| mlp"))]
    assert [line.split(" | ")[:2] for line in lines if "autoprec" not in line] == [
        ["| lstm", "accelerate"],
        ["| lstm", "lightning"],
        ["| mlp", "accelerate"],
        ["| mlp", "lightning"],
    ]
    found = rows.means([good, bad])["chosen"]
    assert found[rows.BEST] == pytest.approx(1.5**0.5)
    assert found[rows.WITHOUT_LARGEST] == pytest.approx(0.5)


def test_a_run_says_its_limit_its_rounds_and_who_took_longer() -> None:
    late = {**peers_row(chosen={"lightning": side(4.0)}), "limit": 120.0}
    ours = {**late["peers"]["autoprec"], "seconds": 129.0}
    late["peers"] = {**late["peers"], "autoprec": ours}
    text = "\n".join(rows.peer_table([late]))
    assert "Everybody was given 120 s" in text
    assert "Longer than the limit: mlp: autoprec 129 s. Ratios are of 12 rounds." in text
    assert "same seconds" not in text


def test_a_peers_row_of_before_has_one_ratio_and_says_what_it_mixes() -> None:
    older = peers_row()
    del older["comparisons"]
    older["peers"]["lightning"] = {**older["peers"]["lightning"], "ours_over": ratio(3.0)}
    text = "\n".join(rows.peer_table([older]))
    assert "mixes policy, batch and allocator" in text
    assert "| 3.00x (2.99-3.01) | not measured | not measured |" in text
