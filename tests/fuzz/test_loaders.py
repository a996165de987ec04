"""What must hold of every loader for every input: it loads, or our error says why; at once."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.mutation import (
    CORPUS,
    CatalogueReader,
    Findings,
    mutants,
    peak_memory,
    read_profile,
    valid_catalogues,
    valid_profiles,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.errors import AutoprecError, ProfileError, UsageError
from autoprec.hardware.catalogue import load_catalogue, profiles_folder
from autoprec.profiles import load_profile, parse_profile
from autoprec.yaml_files import parse_yaml

DEVICES = profiles_folder() / "devices"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def read_catalogue(tmp_path):
    yield CatalogueReader(tmp_path)
    load_catalogue.cache_clear()


def test_mutants_of_a_profile_are_borne():
    findings = Findings()
    for _, text in zip(range(500), mutants(1, valid_profiles()), strict=False):
        findings.run(read_profile, text)
    assert findings.failures == []
    assert findings.accepted > 0


def test_mutants_of_a_device_file_are_borne(read_catalogue):
    findings = Findings()
    for _, text in zip(range(200), mutants(1, valid_catalogues(DEVICES)), strict=False):
        findings.run(read_catalogue, text)
    assert findings.failures == []
    assert findings.accepted > 0


@given(st.text())
def test_any_text_is_a_document_or_an_error(text):
    with contextlib.suppress(UsageError):
        parse_yaml(text, "a.yaml")


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_profile_or_a_profile_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(data)
    with pytest.raises(ProfileError, match=r"bytes\.yaml"):  # 200 bytes hold no whole profile
        load_profile(path)


def test_a_loader_that_fails_otherwise_or_is_slow_is_found():
    findings = Findings()
    findings.run(lambda text: text, "fine")
    findings.run(lambda text: str(1 / len(text)), "")
    findings.run(lambda text: str([len(text) for _ in range(100)]), "slow", calls=50)
    findings.run(lambda text: str([len(text) for _ in text]), "long", calls=50)

    def rambles(text):
        raise UsageError(text * 3000)

    findings.run(rambles, "x")
    assert (findings.inputs, findings.accepted) == (5, 2)
    assert [problem[:12] for _, problem in findings.failures] == [
        *("ZeroDivision", "more than 90", "a message of")
    ]
    assert (findings.most_calls, findings.dearest_input) == (91, "slow")


def test_the_same_seed_gives_the_same_mutants():
    def some(seed):
        return [text for _, text in zip(range(30), mutants(seed, ["a: 1\n"]), strict=False)]

    assert some(1) == some(1)
    assert some(1) != some(2)


# Cases that were found, kept ----------------------------------------------------------------------

KINDS = {"profile": read_profile, "document": lambda text: str(parse_yaml(text, "a.yaml"))}

#: What is read of every case, or said of it.
ANSWERS = {
    "catalogue-chain-of-rows": "more than 20 ancestors",
    "catalogue-deep-pattern": "accepted",
    "catalogue-dtypes-null": "None given, expected a mapping",
    "catalogue-long-pattern": "is longer than 500 characters",
    "catalogue-number-of-5000-digits": "expected a number or a range",
    "document-deep": "nested too deeply",
    "document-sexagesimal": "{'a': '1:1:1:",
    "document-tag-directives": "YAML directives",
    "document-timestamp-out-of-range": "{'a': '2026-13-45T99:99:99Z'}",
    "profile-date-as-evidence": "accepted",
    "profile-hexadecimal-schema": "this autoprec reads schema",
    "profile-infinity-as-evidence": "'.inf' given, expected a finite number",
    "profile-lone-surrogate": "invalid Unicode character escape code",
    "profile-long-integer": "recipe.batch_size: '0xff",
    "profile-next-line-character": "accepted",
    "profile-yes-as-key": "'yes' given as a key",
}


def kept(kind):
    paths = sorted(CORPUS.glob(f"{kind}-*"))
    assert paths, f"no kept case of a {kind}"
    return [pytest.param(path, id=path.stem) for path in paths]


def check_kept(read, path):
    findings = Findings()
    findings.run(read, text_of(path))
    assert findings.failures == []
    try:
        answer = read(text_of(path))
    except AutoprecError as error:
        answer = str(error)
    assert ANSWERS[path.stem] in answer


@pytest.mark.parametrize("path", [*kept("profile"), *kept("document")])
def test_a_case_that_was_found_stays_fixed(path):
    check_kept(KINDS[path.name.partition("-")[0]], path)


@pytest.mark.parametrize("path", kept("catalogue"))
def test_a_device_file_that_was_found_stays_fixed(path, read_catalogue):
    check_kept(read_catalogue, path)


def text_of(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "surrogatepass")


# Memory, code, paths ------------------------------------------------------------------------------

BOMBS = {
    "aliases": "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(
        f"{c}: &{c} [{','.join([f'*{p}'] * 9)}]\n"
        for p, c in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "depth": "[" * 500_000,
    "values": "- 1\n" * 200_000,
    "text": "a: '" + "x" * 900_000 + "'",
    "number": "a: " + "9" * 900_000,
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_no_input_makes_memory_grow_beyond_a_few_times_its_size(text):
    gc.collect()
    assert peak_memory(read_profile, text) < 20_000_000


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:pathlib.Path.touch ['{path}']",
        "!!python/object/new:pathlib.Path ['{path}']",
        "!!python/object/apply:os.system ['touch {path}']",
        "!!python/name:os.system",
        "!!python/module:os",
    ],
)
def test_no_tag_runs_code(tmp_path, tag, read_catalogue):
    target = tmp_path / "touched"
    text = f"a: {tag.format(path=target)}\n"
    for reader in (read_profile, read_catalogue):
        with pytest.raises(AutoprecError, match="YAML tags"):
            reader(text)
    assert not target.exists()


def test_a_profile_of_hostile_texts_is_only_text():
    hostile = "../../etc/passwd"
    document = parse_yaml(valid_profiles()[0], "a.yaml", ProfileError)
    document["task"]["file"] = hostile
    document["recipe"]["float32_modules"] = [hostile, "__import__('os')", "{0.__class__}"]
    profile = parse_profile(document, "a.yaml")
    assert profile.task.file == hostile
    assert profile.recipe.float32_modules[0] == hostile


# The task file: code, run as its user, so only harmless changes to its syntax ---------------------

TASK = """
BATCH_SIZE = 8

def build_model():
    return None

def build_data(batch_size):
    return [batch_size]

def loss_fn(outputs, targets):
    return 0
"""

_LOAD = """
import json, sys
from pathlib import Path
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/tests"]
from autoprec.errors import AutoprecError
from autoprec.workers.task_digest import task_digest
from autoprec.workers.task_file import load_task
from fuzz.mutation import MOST_CALLS, Calls
problems = []
for path in sorted(Path(sys.argv[1]).glob("*.py")):
    before = list(sys.path)
    made = Calls(MOST_CALLS + 10 * path.stat().st_size)
    try:
        with made:
            task_digest(path)
            load_task(path)
    except AutoprecError as error:
        if not str(error) or len(str(error)) > 2000:
            problems.append((path.name, "message: " + str(error)[:100]))
    except BaseException as error:
        problems.append((path.name, repr(error)[:200]))
    if made.count > made.most:
        problems.append((path.name, f"more than {made.most} calls"))
    sys.path[:] = before
    sys.modules.pop(path.stem, None)
print("\\n" + json.dumps(problems))
"""


def broken_tasks():
    """Yield task files cut, bent and strewn with tokens: they hold no call that does harm."""
    yield from (TASK[:at] for at in range(0, len(TASK), 9))
    for at in range(0, len(TASK), 11):
        for token in ("(", ")", ":", "\n", "\t", '"', "'''", "\\", "\x0c", "\ufeff", "é", "²", "$"):
            yield TASK[:at] + token + TASK[at:]
    yield from (TASK.replace("8", value) for value in ("'8'", "0", "-1", "True", "None", "1e9"))
    yield from (TASK.replace("8", value) for value in ("9" * 5000, "0x" + "f" * 5000, "[]", "1/0"))
    yield from (TASK.replace("None", "(" * depth + ")" * depth) for depth in (50, 150, 90_000))
    yield from (TASK.replace("None", "-" * depth + "1") for depth in (500, 50_000))
    yield from (TASK + "x = " + "+".join("1" * n) + "\n" for n in (100, 2_000))
    yield from (TASK.replace(name, "x") for name in ("build_model", "build_data", "loss_fn"))
    yield from (TASK.replace(f"def {name}", f"{name} = 3\ndef f") for name in ("build_model",))
    yield from ("", "\n", "\t", "#", "import no_such_module_x", "raise SystemExit(3)", "raise x")
    yield from ("# -*- coding: nonsense -*-\n" + TASK, "# coding: utf-16\n" + TASK)
    yield from ("class E(BaseException): pass\nraise E", "1" * 10_000)
    yield from ("from . import x", "from .. import x", "import a.b.c.d", "from __future__ import x")
    yield from ("raise Exception('x' * 10)", "x = yield", "return", "await x", "def f(: pass")


def test_a_broken_task_file_is_our_error_and_says_why(tmp_path):
    for index, text in enumerate(broken_tasks()):
        data = text.encode("utf-8")
        (tmp_path / f"task_{index:04}.py").write_bytes(data)
    (tmp_path / "task_nul.py").write_bytes(TASK.encode() + b"\0")
    (tmp_path / "task_latin.py").write_bytes("x = 'é'\n".encode("latin-1"))
    (tmp_path / "task_bytes.py").write_bytes(bytes(range(256)))
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _LOAD, str(tmp_path), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout.splitlines()[-1] == "[]"
