"""The completion script: what a shell offers with it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from autoprec.cli import main
from autoprec.cli.parser import SHELLS


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_option_is_in_it(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for word in ("probe", "tune", "verify", "studies", "proof-seconds", "older-than"):
        assert word in text, word


def offered(completion: Path, words: str, folder: Path) -> set[str]:
    """What bash offers after these words."""
    line = f"""
        source {completion}
        COMP_WORDS=({words} "")
        [[ "{words}" == *" -" || "{words}" == *"--" ]] && COMP_WORDS=({words})
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        $(complete -p autoprec | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    bash = shutil.which("bash")
    assert bash is not None
    ended = subprocess.run(
        [bash, "-c", line], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    return {word.strip() for word in ended.stdout.splitlines() if word.strip()}


def test_what_bash_offers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    completion = tmp_path / "autoprec.bash"
    completion.write_text(script("bash", capsys))
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "model.py").touch()
    assert {"probe", "tune", "report"} <= offered(completion, "autoprec", folder)
    assert offered(completion, "autoprec tune", folder) == {"model.py"}
    assert offered(completion, "autoprec studies", folder) >= {"list", "show", "clear"}
    assert offered(completion, "autoprec report -o", folder) == {"model.py"}
    assert "--strict" in offered(completion, "autoprec tune --", folder)
    assert offered(completion, "autoprec tune --engine", folder) == {"ddp", "fsdp2"}


def test_an_unknown_shell_is_an_argument_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "fish"])
    assert ended.value.code == 2
    assert "invalid choice: 'fish'" in capsys.readouterr().err
