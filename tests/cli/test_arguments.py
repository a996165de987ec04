"""Wrong words on the command line: exit code 2, and the nearest word there is."""

from __future__ import annotations

import pytest

from autoprec.cli import main, probe
from autoprec.errors import AutoprecError, UsageError, UserCodeError


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


@pytest.mark.parametrize(("error", "said"), [(UsageError, "--seed"), (UserCodeError, "`seed`")])
def test_only_messages_of_ours_name_settings_as_flags(
    error: type[AutoprecError],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a task's own code calls `seed` is its own."""

    def run(arguments: object) -> int:
        raise error("`seed` is not a number")

    monkeypatch.setattr(probe, "run", run)
    assert main(["probe"]) == error.exit_code
    assert capsys.readouterr().err == f"autoprec: {said} is not a number\n"
