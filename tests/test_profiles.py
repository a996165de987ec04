"""What must hold of profile files: they read back exactly, and a wrong one says what is wrong."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from fuzz.example import FULL, PLAIN_FLOAT32
from fuzz.values import PLAIN, TEXT, profiles
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec import profile_comments, yaml_files
from autoprec.core.codec import to_plain
from autoprec.core.device.facts import Fingerprint
from autoprec.core.dtypes import DType, Policy
from autoprec.core.numerics.island_proposals import IslandsEvidence
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.profile import (
    Baseline,
    BatchChoice,
    Chosen,
    DeviceRecord,
    Evidence,
    Profile,
    TaskRecord,
)
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import KNOBS, Distributed, LossScale, Recipe
from autoprec.errors import ProfileError
from autoprec.profiles import (
    default_path,
    dump_profile,
    load_folder,
    load_profile,
    parse_profile,
    save_profile,
    to_mapping,
)
from autoprec.tuning.stage_results import REFERENCE
from autoprec.yaml_files import parse_yaml

PROFILE = FULL
SEED = dump_profile(PROFILE)


@settings(max_examples=60)
@given(profiles)
def test_a_saved_profile_loads_as_it_was(tmp_path_factory, profile):
    path = tmp_path_factory.getbasetemp() / "a.profile.yaml"
    save_profile(profile, path)
    assert load_profile(path) == profile


def test_a_recipe_for_one_process_is_written_without_a_section_for_several():
    assert "distributed" not in dump_profile(PROFILE)


def test_a_recipe_for_several_ranks_reads_back(tmp_path):
    recipe = replace(
        PROFILE.recipe,
        distributed=Distributed(engine="fsdp2", world_size=4, reduce_dtype=DType.BFLOAT16),
    )
    several = replace(PROFILE, recipe=recipe)
    path = tmp_path / "a.profile.yaml"
    save_profile(several, path)
    assert load_profile(path) == several
    path.write_text(path.read_text().replace("schema: 3", "schema: 1"))
    with pytest.raises(ProfileError, match=r"schema 1 has no section recipe\.distributed"):
        load_profile(path)


ISLANDS = st.builds(IslandsEvidence, TEXT, st.integers(0, 15), st.floats(0, 1), st.floats(0, 1e9))


@given(st.dictionaries(TEXT, TEXT), TEXT, ISLANDS | st.none())
def test_any_text_and_any_evidence_is_kept_exactly(software, name, islands):
    profile = replace(
        PROFILE,
        software=software,
        task=replace(PROFILE.task, file=name),
        evidence=replace(PROFILE.evidence, islands=islands),
    )
    assert parse_profile(parse_yaml(dump_profile(profile), "a"), "a") == profile


@given(st.floats(0, 1e9))
def test_every_number_is_kept_to_the_last_digit(number):
    evidence = replace(PROFILE.evidence, tuning_seconds=number)
    text = dump_profile(replace(PROFILE, evidence=evidence))
    assert parse_profile(parse_yaml(text, "a"), "a").evidence.tuning_seconds == number


@settings(max_examples=30)
@given(profiles)
def test_the_file_and_json_hold_the_same_mapping(profile):
    read = parse_yaml(dump_profile(profile), "a")
    assert json.loads(json.dumps(read)) == json.loads(json.dumps(to_mapping(profile)))


def test_the_file_is_for_people(tmp_path):
    path = tmp_path / "a.profile.yaml"
    save_profile(PROFILE, path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# Written by autoprec.")
    assert list(parse_yaml(text, "a")) == [
        *("schema", "created", "autoprec", "task", "device", "software", "recipe", "evidence")
    ]
    assert "&" not in text


NOTHING = Evidence(
    baseline=Baseline(Policy.FLOAT32, 32, 100.0, 0.32, 1),
    chosen=Chosen(100.0, 0.32, 1),
    parity=REFERENCE,
    reason="float32",
    trials=1,
    tuning_seconds=1.0,
)


def test_it_begins_with_the_line_for_editors_where_the_schema_is(tmp_path):
    near, below, elsewhere = (tmp_path / "job" / name for name in ("", "fleet/a", "../other"))
    for folder in (below, elsewhere):
        folder.mkdir(parents=True)
    (near / "autoprec.schema.json").write_text("{}")
    lines = {near: "autoprec.schema.json", below: "../../autoprec.schema.json"}
    for folder, place in lines.items():
        save_profile(PROFILE, folder / "m.profile.yaml")
        first, *rest = (folder / "m.profile.yaml").read_text().splitlines(keepends=True)
        assert first == f"# yaml-language-server: $schema={place}\n"
        assert (folder / place).resolve() == near / "autoprec.schema.json"
        assert "".join(rest) == dump_profile(PROFILE)
        assert load_profile(folder / "m.profile.yaml") == PROFILE
    save_profile(PROFILE, elsewhere / "m.profile.yaml")
    assert (elsewhere / "m.profile.yaml").read_text() == dump_profile(PROFILE)


def test_what_there_is_nothing_of_is_left_out_and_read_as_before():
    """A profile of float32 holds no parity of nulls, and no speed-up of no rounds."""
    plain = replace(PROFILE, evidence=NOTHING)
    read = parse_yaml(dump_profile(plain), "a")
    assert set(read["evidence"]) == {
        *("baseline", "chosen", "parity", "reason", "trials", "tuning_seconds")
    }
    assert set(read["evidence"]["parity"]) == {"verdict", "reason"}
    assert None not in read["evidence"]["chosen"].values()
    contract = {f.name for f in fields(Recipe)} - {"distributed"}
    assert set(read["recipe"]) == contract  # whole, for one process
    assert parse_profile(read, "a") == plain
    whole = to_plain(plain)  # nothing left out
    assert whole["evidence"]["speedup"]["rounds"] == 0
    assert parse_profile(whole, "a") == plain


def comments_of(text):
    """The comments beside keys, by the key's path as a YAML reader sees it."""
    paths, found = [], {}
    for line in text.splitlines():
        key = re.match(r"( *)([a-z0-9_]+):", line)
        if key:
            paths = [(at, name) for at, name in paths if at < len(key[1])]
            paths.append((len(key[1]), key[2]))
            if "  # " in line:
                found[".".join(name for _, name in paths)] = line.partition("  # ")[2]
    return found


def test_what_a_reader_would_not_know_is_explained_beside_it():
    scaled = Recipe(batch_size=8).with_policy(Policy.MIXED_FLOAT16)
    recipe = replace(scaled, knobs={"keep_memory": True}, accumulation_steps=4)
    parity = Verdict("equal", "why", None, 1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 0.5, steps=30)
    ratio = Ratio(2.0, 1.9, 2.1, 7)
    chosen = replace(NOTHING.chosen, peak_share=0.5, memory_share=0.1, break_even_steps=7)
    evidence = replace(NOTHING, parity=parity, speedup=ratio, chosen=chosen)
    found = comments_of(dump_profile(replace(PROFILE, recipe=recipe, evidence=evidence)))
    for name in (
        *("device.fingerprint.core_quota", "recipe.knobs.keep_memory", "recipe.accumulation_steps"),
        *("evidence.parity.loss_null", "evidence.parity.gradient_null", "evidence.speedup"),
        *("evidence.parity.trajectory_ratio", "evidence.chosen.peak_share"),
        *("evidence.chosen.break_even_steps", "recipe.loss_scale.floor"),
    ):
        assert len(found[name]) > 10, name


def test_every_comment_belongs_to_a_key_there_is():
    names = {
        *(f"task.{f.name}" for f in fields(TaskRecord)),
        *(f"device.{f.name}" for f in fields(DeviceRecord)),
        *(f"device.fingerprint.{f.name}" for f in fields(Fingerprint)),
        *(f"recipe.{f.name}" for f in fields(Recipe)),
        *(f"recipe.loss_scale.{f.name}" for f in fields(LossScale)),
        *(f"recipe.distributed.{f.name}" for f in fields(Distributed)),
        *(f"recipe.knobs.{name}" for name in KNOBS),
        *(f"evidence.{f.name}" for f in fields(Evidence)),
        *(f"evidence.baseline.{f.name}" for f in fields(Baseline)),
        *(f"evidence.chosen.{f.name}" for f in fields(Chosen)),
        *(f"evidence.batch.{f.name}" for f in fields(BatchChoice)),
        *(f"evidence.parity.{f.name}" for f in fields(Verdict)),
    }
    assert set(profile_comments._COMMENTS) <= names


@given(st.text(max_size=300))
def test_no_text_in_a_profile_is_disturbed_by_comments(text):
    evidence = replace(NOTHING, reason=f"step: {text}", warnings=(text, f"  steps: {text}\n"))
    profile = replace(PROFILE, evidence=evidence)
    assert parse_profile(parse_yaml(dump_profile(profile), "a"), "a") == profile


def test_values_that_stand_twice_are_written_twice():
    (shared,) = PROFILE.evidence.padding
    evidence = replace(PROFILE.evidence, padding=(shared, shared))
    read = parse_yaml(dump_profile(replace(PROFILE, evidence=evidence)), "a")
    assert read["evidence"]["padding"] == [to_plain(shared), to_plain(shared)]


def test_a_file_name_that_is_no_text_can_be_written():
    task = TaskRecord("m\udcff.py", "0", "torch")
    read = parse_yaml(dump_profile(replace(PROFILE, task=task)), "a")
    assert parse_profile(read, "a").task.file == "m?.py"


def test_a_profile_may_be_written_by_hand():
    text = SEED.replace("created: '2026-11-20T12:00:00Z'", "created: 2026-11-20T12:00:00Z")
    assert text != SEED
    assert parse_profile(parse_yaml(text, "a"), "a") == PROFILE


def test_the_profile_is_written_next_to_its_task():
    assert default_path(Path("some/where/model.py")) == Path("some/where/model.profile.yaml")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_profile_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch, number):
    def fail(*_arguments):
        raise OSError(number, os.strerror(number))

    path = tmp_path / "a.profile.yaml"
    save_profile(PROFILE, path)
    monkeypatch.setattr(yaml_files.os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        save_profile(replace(PROFILE, created="later"), path)
    assert load_profile(path) == PROFILE
    assert os.listdir(tmp_path) == [path.name]


# Wrong files --------------------------------------------------------------------------------------


def edited(**changes):
    """Return the seed's mapping with dotted keys (a__b) set, or removed where None is given."""
    document = to_plain(PROFILE)
    for dotted, value in changes.items():
        *folders, name = dotted.split("__")
        place = document
        for folder in folders:
            place = place[folder]
        if value is None:
            del place[name]
        else:
            place[name] = value
    return document


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty; write a profile with `autoprec tune`"),
        ("# only a comment\n", "the file is empty"),
        ("just text", "is no profile: expected a file that `autoprec tune` wrote"),
        ("- a list", "is no profile: expected a file that `autoprec tune` wrote"),
        (SEED[: SEED.index("evidence:")], "the top level: the key 'evidence' is missing"),
        (
            SEED[: SEED.index("mixed_float16") + 10],
            "recipe.policy: 'mixed_floa' given, .*; did you mean",
        ),
        (SEED + "schema: 3\n", "line [0-9]+: the key 'schema' is given twice"),
        (
            SEED.replace("schema: 3", "schema: 4"),
            "schema 4 given, this autoprec reads schema 1, 2 and 3",
        ),
        (SEED.replace("schema: 3", "schema: true"), "schema True given, this autoprec reads"),
        (SEED.replace("schema: 3", "schema: 3.0"), "schema 3.0 given, this autoprec reads"),
        (
            SEED.replace("schema: 3\n", ""),
            "no schema given, this autoprec reads schema 1, 2 and 3; tune",
        ),
        (SEED.replace("schema: 3", "schema: [" + "1," * 500 + "]"), "schema list given, this"),
        (SEED.replace("recipe:", "recipe: ]"), "line [0-9]+: not valid YAML"),
        (SEED.replace("recipe:", "recpe:"), r"recpe: unknown key; did you mean 'recipe'\?"),
        ("a: !!python/name:os.system", "line 1: YAML tags"),
    ],
)
def test_a_wrong_file_is_told_with_its_name_and_the_problem(tmp_path, text, message):
    path = tmp_path / "wrong.profile.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError, match=message) as caught:
        load_profile(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": None}, "the top level: the key 'recipe' is missing"),
        ({"recipe__batch_size": 0}, "recipe.batch_size: 0 given, expected a number from 1 to"),
        ({"recipe__batch_size": "8"}, "recipe.batch_size: '8' given, expected an integer"),
        ({"recipe__compile": 1}, "recipe.compile: 1 given, expected true or false"),
        ({"recipe__knobs": {"thread": 1}}, "unknown setting 'thread'; did you mean 'threads'"),
        ({"recipe__alignement": 8}, "recipe.alignement: unknown key; did you mean 'alignment'"),
        ({"evidence__speedup__low": -1.0}, "evidence.speedup.low: -1.0 given, expected a number"),
        ({"device__fingerprint__kind": "gpu"}, "device.fingerprint.kind: 'gpu' given, expected"),
        ({"software": ["torch"]}, "software: list given, expected a mapping"),
        ({"task__sha256": 5}, "task.sha256: 5 given, expected text"),
    ],
)
def test_a_wrong_value_is_told_with_its_place_what_was_expected_and_the_fix(changes, message):
    with pytest.raises(ProfileError, match=message) as caught:
        parse_profile(edited(**changes), "a.yaml")
    assert str(caught.value).startswith("a.yaml: ")
    assert str(caught.value).endswith("(correct the file, or write a new one with `autoprec tune`)")


@given(PLAIN, st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_any_value_anywhere_is_a_profile_or_a_profile_error(value, path):
    document = to_plain(PROFILE)
    place = document
    for step in path:
        keys = list(place)
        name = keys[step % len(keys)]
        if not (isinstance(place[name], dict) and place[name]):
            break
        place = place[name]
    place[name] = value
    with contextlib.suppress(ProfileError):
        assert isinstance(parse_profile(document, "a.yaml"), Profile)


def test_a_profile_that_was_cut_off_after_any_line_is_none():
    lines = dump_profile(PLAIN_FLOAT32).splitlines(keepends=True)
    for count in range(len(lines)):
        with pytest.raises(ProfileError):
            parse_profile(parse_yaml("".join(lines[:count]), "cut.yaml", ProfileError), "cut.yaml")


def test_a_missing_file_and_a_folder_are_told(tmp_path):
    with pytest.raises(ProfileError, match="there is no such file"):
        load_profile(tmp_path / "none.profile.yaml")
    with pytest.raises(ProfileError, match="is a folder; give one profile file"):
        load_profile(tmp_path)


# Folders ------------------------------------------------------------------------------------------


def test_a_folder_gives_its_profiles_by_name(tmp_path):
    save_profile(PROFILE, tmp_path / "b.yaml")
    save_profile(replace(PROFILE, created="later"), tmp_path / "a.yml")
    (tmp_path / "notes.txt").write_text("no profile")
    (tmp_path / "folder.yaml").mkdir()
    loaded = load_folder(tmp_path)
    assert list(loaded) == ["a.yml", "b.yaml"]
    assert loaded["b.yaml"] == PROFILE


def test_a_folder_without_a_profile_or_none_is_told(tmp_path):
    with pytest.raises(ProfileError, match=r"no profile \(\*.yaml\) in this folder"):
        load_folder(tmp_path)
    with pytest.raises(ProfileError, match=r"cannot be read: .*; give a folder"):
        load_folder(tmp_path / "none")


def test_one_wrong_profile_in_a_folder_is_named(tmp_path):
    save_profile(PROFILE, tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text("schema: 7")
    with pytest.raises(ProfileError, match=r"b\.yaml: schema 7 given"):
        load_folder(tmp_path)


@settings(max_examples=30)
@given(profiles)
def test_no_text_in_a_profile_is_used_as_a_path(tmp_path_factory, profile):
    """Loading opens the one file it was given, whatever the profile holds."""
    folder = tmp_path_factory.getbasetemp() / "alone"
    path = folder / "a.yaml"
    escaping = replace(profile, task=replace(profile.task, file="../../etc/passwd"))
    save_profile(escaping, path)
    assert load_profile(path).task.file == "../../etc/passwd"
    assert os.listdir(folder) == ["a.yaml"]
