"""Wrong words on the command line: exit code 2, and the nearest word there is."""

from __future__ import annotations

import pytest

from autoprec.cli import main


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["tune", "--polices", "bf16", "model.py"], "--polices: did you mean --policies?"),
        (["tun", "model.py"], "tun: did you mean tune?"),
        (["probe", "--jsn"], "--jsn: did you mean --json?"),
    ],
)
def test_a_word_that_is_nearly_right_is_named(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


def test_a_word_that_is_nothing_like_any_gets_no_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["probe", "--qqqqqqqq"])
    assert "did you mean" not in capsys.readouterr().err
