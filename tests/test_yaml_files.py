"""What must hold of documents: plain values or our error, soon; a file is whole or unchanged."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest
import yaml
from fuzz.values import PLAIN, TEXT
from hypothesis import given
from hypothesis import strategies as st

from autoprec import yaml_files
from autoprec.errors import CatalogueError, UsageError
from autoprec.yaml_files import MAX_DEPTH, MAX_VALUES, parse_yaml, read_yaml, write_text

MAPPINGS = st.dictionaries(TEXT, PLAIN, max_size=4)


@given(MAPPINGS)
def test_plain_values_read_as_yaml_says(value):
    text = yaml.safe_dump(value, allow_unicode=True)
    assert parse_yaml(text, "a.yaml") == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# nothing\n", None),
        ("\ufeffa: 1\r\nb: 2\r\n", {"a": 1, "b": 2}),
        ("a: 2026-11-20T12:00:00Z", {"a": "2026-11-20T12:00:00Z"}),
        ("a: 2026-11-20", {"a": "2026-11-20"}),
        ("a: [yes, no, ~, 0x10, 1.5e+3, '1']", {"a": [True, False, None, 16, 1500.0, "1"]}),
        ("'<<': {b: 1}", {"<<": {"b": 1}}),
        ("a: =", {"a": "="}),
        ("a: " + "1" * 100, {"a": "1" * 100}),
        ("a: " + "1:" * 100 + "1", {"a": "1:" * 100 + "1"}),
        ("--- {a: 1}\n...\n", {"a": 1}),
    ],
)
def test_what_a_person_writes_reads_as_meant(text, value):
    assert parse_yaml(text, "a.yaml") == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: ]", "a.yaml, line 1: not valid YAML: "),
        ("a: 1\nb: }", "a.yaml, line 2: not valid YAML: "),
        ("a: \x00", "a.yaml: not valid YAML: .*control characters"),
        ("a: \ud800", "a.yaml: not valid YAML: .*surrogates not allowed"),
        ("a: 1\na: 2", "a.yaml, line 2: the key 'a' is given twice"),
        ("a: {b: 1, b: 1}", "a.yaml, line 1: the key 'b' is given twice"),
        ("a: &x {}\nb: *x", "line 1: YAML aliases are not used; write it out"),
        ("a: *x", "line 1: YAML aliases are not used"),
        ("a: !!python/object/apply:os.system [ls]", r"line 1: YAML tags \('tag:yaml.org,2002:pyt"),
        ("a: !!binary aGk=", "line 1: YAML tags .* are not used; write a plain value"),
        ("a: !!set {b, c}", "line 1: YAML tags"),
        ("a: ! b", "line 1: YAML tags"),
        ("%YAML 1.1\n---\na: 1", "a.yaml: YAML directives"),
        ("# x\r%TAG ! !!\r---\ra: 1", "a.yaml: YAML directives"),
        ("<<: {a: 1}", "line 1: '<<' given as a key, expected plain keys"),
        ("yes: 1", "line 1: 'yes' given as a key, expected plain keys: quote it"),
        ("a: {1: 2}", "line 1: '1' given as a key, expected plain keys: quote it"),
        ("? [a]\n: b", "line 1: a collection given as a key, expected plain keys"),
        ("a: .inf", "line 1: '.inf' given, expected a finite number"),
        ("a: .nan", "line 1: '.nan' given, expected a finite number"),
        ("a: 1.0e+999", "line 1: '1.0e[+]999' given, expected a finite number"),
        ("a: 0x_", "line 1: '0x_' is not a number"),
        ("a: 1\n---\nb: 1", "line 2: a second document begins; expected one"),
    ],
)
def test_what_no_file_of_ours_holds_is_refused_with_its_place(text, message):
    with pytest.raises(UsageError, match=f"^(a.yaml, )?{message}"):
        parse_yaml(text, "a.yaml")


def test_depth_and_count_are_limited():
    assert parse_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH, "a.yaml")
    with pytest.raises(UsageError, match="nested too deeply: 40 levels are allowed"):
        parse_yaml("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "a.yaml")
    assert len(parse_yaml("- 1\n" * (MAX_VALUES - 1), "a.yaml")) == MAX_VALUES - 1
    with pytest.raises(UsageError, match="line 20000: more than 20000 values"):
        parse_yaml("- 1\n" * MAX_VALUES, "a.yaml")


LONG = {
    "open lists": "[" * 900_000,
    "open mappings": "{a: " * 200_000,
    "dashes": "- " * 400_000,
    "questions": "? " * 400_000,
    "tag directives": "%TAG !a! b\n" * 80_000 + "--- 1",
    "sexagesimal number": "a: " + "1:" * 400_000 + "1",
    "long number": "a: " + "1" * 900_000,
    "long hexadecimal number": "a: 0x" + "f" * 900_000,
    "many items": "[" + "1," * 490_000 + "1]",
    "many keys": "".join(f"k{i}: 1\n" for i in range(90_000)),
    "many documents": "--- 1\n" * 100_000,
    "comments": "#\n" * 450_000,
    "escapes": 'a: "' + "\\x41" * 220_000 + '"',
    "folded lines": "a: >\n" + " x\n\n" * 200_000,
    "anchors": "".join(f"- &a{i} 1\n" for i in range(80_000)),
    "alias bomb": "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b]\n",
    "colons": ":" * 900_000,
    "steps": "".join(" " * i + "a:\n" for i in range(1_400)),
}


class Counting(yaml_files._Loader):
    """Counts what makes a parser slow: events, open collections, digits of numbers, directives."""

    def __init__(self, text):
        super().__init__(text)
        self.events = self.open = self.deepest = self.digits = 0
        self.directives = text.count("%TAG")
        counted.append(self)

    def get_event(self):
        event = super().get_event()
        self.events += 1
        self.open += isinstance(event, yaml.CollectionStartEvent)
        self.open -= isinstance(event, yaml.CollectionEndEvent)
        self.deepest = max(self.deepest, self.open)
        return event

    def resolve(self, kind, value, implicit):
        self.digits += len(value)
        return super().resolve(kind, value, implicit)


counted: list[Counting] = []


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_no_input_of_the_largest_size_is_much_work(text, monkeypatch):
    """Two events a value, numbers of 64 digits, no directive: their squares are what takes long."""
    monkeypatch.setattr(yaml_files, "_Loader", Counting)
    counted.clear()
    assert len(text) <= yaml_files.MAX_FILE_BYTES
    try:
        parse_yaml(text, "a.yaml")
    except UsageError as error:
        assert len(str(error)) < 500  # noqa: PT017 (either way is right)
    assert len(counted) == ("%TAG" not in text)
    for loader in counted:
        assert loader.events <= 2 * MAX_VALUES + 5
        assert loader.deepest <= MAX_DEPTH + 1
        assert loader.digits <= 64 * loader.events
        assert loader.directives == 0


# Reading files ------------------------------------------------------------------------------------


def test_a_file_is_read_and_named_in_errors(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: ü", encoding="utf-8")
    assert read_yaml(path) == {"a": "ü"}
    path.write_text("a: ]")
    with pytest.raises(CatalogueError, match=r"a\.yaml, line 1: not valid YAML"):
        read_yaml(path, CatalogueError)


def test_what_cannot_be_read_is_told(tmp_path):
    with pytest.raises(CatalogueError, match=r"none\.yaml: there is no such file"):
        read_yaml(tmp_path / "none.yaml", CatalogueError)
    with pytest.raises(CatalogueError, match="cannot be read: "):
        read_yaml(tmp_path, CatalogueError)
    with pytest.raises(CatalogueError, match=r"cannot be read: .*null"):
        read_yaml(Path("a\0b"), CatalogueError)
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(CatalogueError, match="cannot be read: it is not UTF-8 text"):
        read_yaml(path, CatalogueError)


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"a" * yaml_files.MAX_FILE_BYTES)
    assert read_yaml(path)
    path.write_bytes(b"a" * (yaml_files.MAX_FILE_BYTES + 1))
    with pytest.raises(UsageError, match="larger than 1000000 bytes"):
        read_yaml(path)
    if Path("/dev/zero").exists():
        with pytest.raises(UsageError, match="larger than 1000000 bytes"):
            read_yaml(Path("/dev/zero"))


# Writing files ------------------------------------------------------------------------------------


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r")))
def test_what_is_written_is_in_the_file(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    write_text(path, text)
    assert path.read_text(encoding="utf-8") == text


def test_folders_are_made_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "new" / "folder" / "a.yaml"
    write_text(path, "one")
    write_text(path, "two")
    assert path.read_text() == "two"
    assert os.listdir(path.parent) == ["a.yaml"]


def test_a_new_file_may_be_read_as_the_umask_says(tmp_path):
    path = tmp_path / "a.yaml"
    before = os.umask(0o027)
    try:
        write_text(path, "one")
        assert os.umask(0o027) == 0o027  # and the umask is as it was
    finally:
        os.umask(before)
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_the_longest_name_can_be_written(tmp_path):
    path = tmp_path / ("x" * 250 + ".yaml")
    write_text(path, "one")
    assert path.read_text() == "one"


def test_a_link_stays_one_and_its_target_is_written(tmp_path):
    target, link = tmp_path / "shared" / "target.yaml", tmp_path / "link.yaml"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def fail_with(number):
    def fail(*_arguments, **_keywords):
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step, number):
    path = tmp_path / "a.yaml"
    write_text(path, "old")
    monkeypatch.setattr(os, step, fail_with(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.yaml"]


def test_an_interruption_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    def interrupt(_file):
        raise KeyboardInterrupt

    path = tmp_path / "a.yaml"
    write_text(path, "old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.yaml"]


def test_a_really_full_device_is_an_error_and_no_file(tmp_path, monkeypatch):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    opened = os.fdopen

    def full(handle, *arguments, **keywords):
        os.close(handle)
        return opened(os.open("/dev/full", os.O_WRONLY), *arguments, **keywords)

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_text(tmp_path / "a.yaml", "new")
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "a.yaml"
    write_text(path, "old")
    if os.name == "posix" and os.geteuid() != 0:
        tmp_path.chmod(0o500)
    else:  # the superuser may write anywhere
        monkeypatch.setattr(yaml_files.tempfile, "mkstemp", fail_with(errno.EACCES))
    try:
        with pytest.raises(PermissionError):
            write_text(path, "new")
    finally:
        tmp_path.chmod(0o700)
    assert path.read_text() == "old"


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", fail_with(errno.EACCES))
    yaml_files._sync_folder(tmp_path)


def test_a_reader_sees_the_old_file_or_the_new_one_and_never_a_part(tmp_path):
    path = tmp_path / "a.yaml"
    texts = {letter * 200_000 for letter in "ab"}
    write_text(path, "a" * 200_000)
    done = threading.Event()

    def write():
        for _ in range(20):
            for text in sorted(texts):
                write_text(path, text)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reads = 0
    while not done.is_set() or reads == 0:
        assert path.read_text() in texts
        reads += 1
    writer.join()
