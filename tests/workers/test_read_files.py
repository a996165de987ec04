"""What a script reads makes another digest; what it writes, and what others read, does not."""

from __future__ import annotations

import builtins
import io
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from autoprec.profiles import dump_profile
from autoprec.workers.read_files import ReadFiles
from autoprec.workers.task_source import TaskSource
from tests.core.example_profile import PROFILE

Digest = Callable[..., str]


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Digest:
    """Run a script in its folder; return the digest of what it read."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(text: str, *arguments: str) -> str:
        script = folder / "train.py"
        script.write_text(text)
        with ReadFiles(TaskSource(script, arguments=arguments, script=True)) as files:
            exec(compile(text, str(script), "exec"), {"__name__": "__main__"})
        monkeypatch.chdir(folder)
        return files.digest()

    return run


READS = {
    "open": "open('settings.json').close()",
    "bytes": "open(b'settings.json', mode='rb').close()",
    "pathlib": "from pathlib import Path; Path('settings.json').read_text()",
    "a library": "import configparser; configparser.ConfigParser().read('settings.json')",
    "a folder": "import os; os.chdir('..'); open('project/settings.json').close()",
}


@pytest.mark.parametrize("text", READS.values(), ids=READS)
def test_what_a_script_reads_is_part_of_it(digest: Digest, text: str) -> None:
    Path("settings.json").write_text("[a]\nb=1\n")
    before = digest(text)
    assert before
    assert digest(text) == before
    Path("settings.json").write_text("[a]\nb=2\n")
    assert digest(text) != before


UNREAD = {
    "nothing": "",
    "its own code": "open('train.py').close()",
    "what it writes": "open('log', 'w').close(); open('log').close()",
    "what it adds to": "open('settings.json').close(); open('settings.json', 'a').close()",
    "a hidden folder": "open('.git/HEAD').close()",
    "what is not there": "try: open('none')\nexcept OSError: pass",
    "elsewhere": "open('../elsewhere').close()",
    "a descriptor": "import os; open(os.open('settings.json', os.O_RDONLY)).close()",
    "its profile": "from autoprec import load_profile; load_profile('model.profile.yaml')",
}


@pytest.mark.parametrize("text", UNREAD.values(), ids=UNREAD)
def test_other_files_are_not_part_of_it(digest: Digest, text: str) -> None:
    Path(".git").mkdir()
    Path("model.profile.yaml").write_text(dump_profile(PROFILE))
    found = set()
    for content in ("one", "other"):
        for name in ("settings.json", ".git/HEAD", "../elsewhere"):
            Path(name).write_text(content)
        found.add(digest(text))
    assert len(found) == 1


def test_a_file_elsewhere_counts_where_an_argument_names_it(digest: Digest) -> None:
    text = "open('../elsewhere').close()"
    for argument in ("../elsewhere", "--data=../elsewhere"):
        Path("../elsewhere").write_text("one")
        before = digest(text, argument)
        assert before
        Path("../elsewhere").write_text("other")
        assert digest(text, argument) != before


def test_of_a_large_file_its_ends_and_its_size_count(digest: Digest) -> None:
    text, data = "open('data').close()", bytearray(3 * 2**20)
    found = []
    for change in (lambda: None, lambda: data.extend(b"0"), lambda: data.__setitem__(-9, 1)):
        change()
        Path("data").write_bytes(data)
        found.append(digest(text))
    assert len(set(found)) == 3


def test_afterwards_files_are_opened_as_before_and_errors_show_no_frame_of_ours(
    digest: Digest,
) -> None:
    before = builtins.open, io.open
    with pytest.raises(FileNotFoundError) as caught:
        digest("open('none')")
    assert (builtins.open, io.open) == before
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert "autoprec" not in frames[-1].filename
    assert frames[-2].filename.endswith("train.py")
