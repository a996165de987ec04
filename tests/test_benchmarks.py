"""What the benchmarks make of their results: rows, ratios, gates, staleness; nothing is run."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoprec.core.codec import to_plain
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.speed.space import Space
from autoprec.core.speed.trial_results import Outcome, Status

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
BF16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=64)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import one of the benchmarks, as its neighbours do."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def ratio(value: float, spread: float = 0.01) -> dict[str, float]:
    return {"ratio": value, "low": value - spread, "high": value + spread, "rounds": 12}


def test_every_program_fits_in_a_file() -> None:
    for path in BENCHMARKS.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 400, path


# Staleness ----------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Any:
    """A repository of two files and one commit, and what commits in it; the commit's name."""

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        command = ["git", *identity, *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "subject.py").write_text("1")
    (tmp_path / "other.py").write_text("1")
    git("add", ".")
    git("commit", "-qm", "first")
    return tmp_path, git, git("rev-parse", "--short", "HEAD")


def test_a_result_is_stale_once_what_it_speaks_of_changes(load: Any, repository: Any) -> None:
    module = load("provenance")
    root, git, first = repository
    assert module.staleness(first, ["subject.py"], root) == module.CURRENT
    (root / "other.py").write_text("2")
    git("commit", "-qam", "another file")
    assert module.staleness(first, ["subject.py"], root) == module.CURRENT
    (root / "subject.py").write_text("2")  # in no commit yet
    assert module.staleness(first, ["subject.py"], root) == module.STALE
    git("commit", "-qam", "the subject")
    assert module.staleness(first, ["subject.py"], root) == module.STALE


def test_without_the_history_stale_or_not_is_unknown(
    load: Any, repository: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    module = load("provenance")
    root, git, first = repository
    (root / "subject.py").write_text("2")
    git("commit", "-qam", "the subject")
    elsewhere = tmp_path_factory.mktemp("shallow") / "clone"
    git("clone", "-q", "--depth", "1", f"file://{root}", str(elsewhere))
    assert module.staleness(first, ["subject.py"], elsewhere) == module.UNKNOWN
    no_git = tmp_path_factory.mktemp("no-git")
    assert module.staleness(first, ["subject.py"], no_git) == module.UNKNOWN
    assert module.commit(no_git) == module.UNKNOWN
    for measured in (None, module.UNKNOWN, first + module.DIRTY):
        assert module.staleness(measured, ["subject.py"], root) == module.UNKNOWN
    said = module.staleness_in_words("replay", [])
    assert said == "Measured at a commit that was not kept; stale or not is unknown."


def test_what_results_speak_of_is_there(load: Any) -> None:
    for paths in load("provenance").SUBJECTS.values():
        assert [path for path in paths if not (BENCHMARKS.parent / path).exists()] == []


def test_the_pages_are_what_the_report_makes_of_the_results(load: Any) -> None:
    """So a result that has become stale is marked as such: the report says it, and must be run."""
    report = load("report")
    again = "run python benchmarks/report.py and commit what it writes"
    unknown = "stale or not is unknown"
    made, kept = report.page(), report.PAGE.read_text(encoding="utf-8")
    pairs = list(zip(made.splitlines(), kept.splitlines(), strict=False))
    assert len(made.splitlines()) == len(kept.splitlines()), again
    assert [p for p in pairs if p[0] != p[1] and unknown not in p[0]] == [], again
    readme = report.README.read_text(encoding="utf-8")
    assert report.readme(readme) == readme, again
    beyond = [p[1] for p in pairs if p[0] != p[1]]
    if beyond:
        pytest.skip(f"stale unknown: this copy has not the history that {beyond} speaks of")


# Overhead -----------------------------------------------------------------------------------------


def test_the_fixed_cost_is_where_the_line_meets_a_step_of_none(load: Any) -> None:
    fit = load("overhead_fit")
    steps = (0.0003, 0.001, 0.005, 0.1)
    pairs = [fit.Pair(s, s * 1.02 + 20e-6, s, 8) for s in steps]
    assert fit.fixed_cost(pairs) == pytest.approx(20e-6)
    with pytest.raises(ValueError, match="expected two different ones or more"):
        fit.fixed_cost(pairs[:1] * 3)


def test_a_long_step_that_is_off_moves_the_fixed_cost_little(load: Any) -> None:
    fit = load("overhead_fit")
    pairs = [fit.Pair(s, s + 20e-6, s, 8) for s in (0.0003, 0.001, 0.002, 0.005, 0.02)]
    pairs.append(fit.Pair(0.1, 0.103, 0.1, 8))  # 3 % of 100 ms are 3000 us
    assert fit.fixed_cost(pairs) == pytest.approx(20e-6, abs=10e-6)


def test_the_gate_is_the_upper_end(load: Any) -> None:
    fit = load("overhead_fit")
    near = [fit.Pair(0.005, 0.005 * r, 0.005, 8) for r in (1.0, 1.001, 1.002, 1.003, 1.004, 1.012)]
    row = fit.case(fit.TORCH, "float32", near)
    assert row["ratio"]["ratio"] < fit.PROMISED_RATIO < row["ratio"]["high"]
    assert row["kept"] is False
    assert fit.case(fit.TORCH, "float32", near[:5] + near[:1])["kept"] is True
    short = [replace(pair, ours=pair.ours / 10, theirs=pair.theirs / 10) for pair in near]
    assert fit.case(fit.TORCH, "float32", short)["kept"] is None  # nothing is promised of 0.5 ms
    assert fit.case("Keras train_on_batch", "float32", near)["kept"] is None


def test_the_fixed_costs_gate_is_the_upper_end_over_processes(load: Any) -> None:
    fit = load("overhead_fit")

    def process(cost: float) -> list[Any]:
        return [fit.Pair(s, s + cost, s, 8) for s in (0.001, 0.01)]

    found = fit.fixed(fit.TORCH, "float32", [process(c * 1e-6) for c in (1, 2, 3, 4, 5, 11)])
    assert found["fixed"]["middle"] == pytest.approx(3.5e-6)
    assert found["kept"] is False
    assert fit.fixed(fit.TORCH, "float32", [process(9e-6)] * 6)["kept"] is True
    said = fit.missed({"cases": [], "fixed": [found]})
    assert said == ["torch loop, float32: fixed cost's upper end 11 us, promised 10 us"]


def test_lengths_that_one_process_lacks_are_left_out(load: Any) -> None:
    fit = load("overhead_fit")
    both = [fit.Pair(0.001, 1, 1, 4), fit.Pair(0.005, 1, 1, 8)]
    assert fit.by_target([both, both[:1]]) == [[both[0], both[0]]]


# Grids and the oracle -----------------------------------------------------------------------------


def outcome(point: Any, rate: float) -> Outcome:
    seconds = 1 / rate
    measured = Measurement(
        step_seconds=seconds, low=seconds, high=seconds, steps=9, samples_per_step=1
    )
    return Outcome(point, Status.OK, measured)


SPACE = Space(
    policies=(Policy.FLOAT32, Policy.MIXED_BFLOAT16),
    batch_sizes=(8, 16),
    knobs={
        "keep_memory": (False, True),
        "fused_optimizer": (False, True),
        "implicit_bfloat16": (False, True),
    },
)


def test_further_knobs_are_measured_at_the_fastest_only(load: Any) -> None:
    grids = load("grids")
    first = grids.points_of(SPACE, whole=False)
    assert len(first) == 8
    assert grids.further_knobs(SPACE) == ("fused_optimizer", "implicit_bfloat16")
    assert not any(p["fused_optimizer"] or p["implicit_bfloat16"] for p in first)
    assert len(grids.points_of(SPACE, whole=True)) == 32
    grid = grids.Grid(tuple(outcome(p, 1.0 + i) for i, p in enumerate(first)))
    fastest = grid.fastest(2)
    assert [o.point for o in fastest] == [first[-1], first[-2]]
    more = grids.refined(SPACE, [o.point for o in fastest])
    assert len(more) == 8
    assert first[-1] in more


def test_a_grid_of_another_commit_counts_only_where_it_is_asked_for(
    load: Any, tmp_path: Path
) -> None:
    grids = load("grids")
    head = {"date": "2026-01-01", "commit": "abc1234", "family": "amd-zen4", "torch": "2.13"}
    path = tmp_path / "amd-zen4" / "mlp.json"
    point = grids.points_of(SPACE, whole=False)[0]
    grids.writer(path, head, grids.further_knobs(SPACE))([outcome(point, 5.0)])
    assert "fused_optimizer" not in path.read_text()
    assert [o.point for o in grids.read_curves(path, SPACE, head)] == [point]
    assert grids.read_curves(path, SPACE, {**head, "date": "2026-02-02"})
    other = {**head, "commit": "def5678"}
    assert grids.read_curves(path, SPACE, other) == []
    assert grids.read_curves(path, SPACE, other, any_commit=True)
    assert grids.read_curves(path, SPACE, {**head, "torch": "2.14"}, any_commit=True) == []
    assert grids.commit_of(path) == "abc1234"
    dirty = {**head, "commit": "abc1234-dirty"}
    grids.writer(path, dirty)([outcome(point, 5.0)])
    assert grids.read_curves(path, SPACE, dirty) == []


def row(task: str = "mlp", family: str = "amd-zen4", best: float = 1.0, **more: Any) -> Any:
    """An oracle's row as it is now."""
    return {
        "date": "2026-12-01",
        "commit": "abc1234",
        "family": family,
        "task": task,
        "points": 40,
        "trials": 10,
        "killed": 0,
        "grid_seconds": 200.0,
        "knobs_of_the_fastest": ["fused_optimizer"],
        "fastest": [],
        "stages": {"preflight": 2.0, "search": 10.0, "heats": 4.0, "proof": 30.0, "finish": 4.0},
        "recipes": {"chosen": to_plain(replace(BF16, knobs={"fused_optimizer": True}))},
        "chosen_over_best": ratio(best),
        "chosen_over_float32": ratio(3.0),
        "chosen_over_float32_alike": ratio(1.5),
        "best_over_float32": ratio(3.0),
        "second_over_chosen": ratio(1.0),
        "reason": "mixed_bfloat16 at batch 64 is 3.00x float32 as it was run (2.9-3.1, 6 rounds) "
        "and trains like float32",
        **more,
    }


def test_the_whole_tuning_is_counted_against_the_grid(load: Any) -> None:
    rows = load("oracle_rows")
    one = row()
    assert rows.share(one) == pytest.approx(50 / 200)
    assert rows.share_of_choosing(one) == pytest.approx(18 / 200)
    assert rows.share_of_short(one) == pytest.approx(50 / (1.0 * 40))


def test_a_table_has_the_whole_recipe_and_float32_alike_or_says_that_it_was_not_measured(
    load: Any,
) -> None:
    rows = load("oracle_rows")
    older = {k: v for k, v in row("lstm").items() if k != "chosen_over_float32_alike"}
    lines = list(rows.table([row(), older]))
    assert "mixed_bfloat16, batch 64, fused_optimizer" in lines[2]
    assert "1.50 (1.49-1.51)" in lines[2]
    assert "not measured" in lines[3]
    assert "chosen/float32 alike not measured" in rows.summary([row(), older])
    assert "chosen/float32 alike 1.50x" in rows.summary([row()])
    assert "fused_optimizer, which the tuner tries too, at the five" in rows.explanation([row()])


def write_rows(folder: Path, name: str, rows: list[Any]) -> None:
    (folder / name).write_text("".join(f"{json.dumps(each)}\n" for each in rows))


def test_the_readme_has_the_worst_machine_beside_the_best_and_counts_runs(
    load: Any, tmp_path: Path
) -> None:
    search = load("report_search")
    write_rows(tmp_path, "oracle-2026-12-01-a.jsonl", [row(best=1.01), row("lstm")])
    write_rows(tmp_path, "oracle-2026-12-02-b.jsonl", [row(family="amd-zen5", best=0.9)])
    write_rows(tmp_path, "oracle-2026-12-02-c.jsonl", [row(family="intel-amx", best=0.95)])
    write_rows(tmp_path, "oracle-2026-11-01-a.jsonl", [row(best=0.5)])  # an earlier run
    found = [(r["task"], r["family"]) for r in search.best_and_worst(tmp_path)]
    assert found == [("lstm", "amd-zen4"), ("mlp", "amd-zen4"), ("mlp", "amd-zen5")]
    assert search.runs_of("mlp", tmp_path) == 4
    text = "\n".join(search.oracle_summary(tmp_path))
    assert "| mlp | Zen 5, 2026-12-01 | 4 | 0.900" in text


def test_every_machine_has_a_row_and_a_new_one_adds_its_own(load: Any, tmp_path: Path) -> None:
    search = load("report_search")
    write_rows(tmp_path, "oracle-2026-12-01-a.jsonl", [row(search.SHOWN)])
    write_rows(tmp_path, "peers-2026-12-01-b.jsonl", [{"family": "new-cpu", "date": "2026-12-01"}])
    lines = list(search.machines(tmp_path))[2:]
    assert lines[0].startswith("| Zen 4 | 2026-12-01 | mixed_bfloat16, batch 64, fused_optimizer |")
    assert lines[0].endswith("| 1.50 (1.49-1.51) | trains like float32 |")
    assert lines[1] == "| new-cpu" + " | not measured" * 5 + " |"
    write_rows(tmp_path, "oracle-2026-12-01-b.jsonl", [row(search.SHOWN, "new-cpu")])
    assert len(list(search.machines(tmp_path))) == 4
    assert "| new-cpu | 2026-12-01 |" in "\n".join(search.machines(tmp_path))


# Peers --------------------------------------------------------------------------------------------


def side(value: float) -> dict[str, Any]:
    return {"ours": to_plain(BF16), "theirs": to_plain(BF16), "ours_over": ratio(value)}


def peers_row(**comparisons: Any) -> dict[str, Any]:
    found = {"note": "first", "recipe": to_plain(BF16), "seconds": 3.0}
    return {
        "task": "mlp",
        "peers": {"lightning": found, "accelerate": found, "autoprec": found},
        "comparisons": comparisons,
    }


def test_each_of_the_three_ratios_has_its_geometric_mean(load: Any) -> None:
    rows = load("peers_rows")
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


def test_a_peers_row_of_before_has_one_ratio_and_says_what_it_mixes(load: Any) -> None:
    rows = load("peers_rows")
    older = peers_row()
    del older["comparisons"]
    older["peers"]["lightning"] = {**older["peers"]["lightning"], "ours_over": ratio(3.0)}
    text = "\n".join(rows.peer_table([older]))
    assert "mixes policy, batch and allocator" in text
    assert "| 3.00 (2.99-3.01) | not measured | not measured |" in text


def test_a_rival_may_have_what_autoprec_tries_and_chooses_what_it_chooses(load: Any) -> None:
    entrants = load("entrants")
    space = replace(SPACE, memory_formats=("contiguous", "channels_last"))
    found = entrants.ways(BF16, space, layout_chosen=False)
    assert {(w.memory_format, w.knobs.get("fused_optimizer", False)) for w in found} == {
        (layout, fused) for layout in ("contiguous", "channels_last") for fused in (False, True)
    }
    assert all(w.policy is BF16.policy and w.batch_size == 64 for w in found)
    own = entrants.ways(replace(BF16, memory_format="channels_last"), space, layout_chosen=True)
    assert {w.memory_format for w in own} == {"channels_last"}
    plain = replace(space, knobs={}, memory_formats=("contiguous",))
    assert entrants.ways(BF16, plain, layout_chosen=False) == [BF16]


def test_knobs_apart_changes_neither_policy_nor_batch_nor_what_products_are_computed_in(
    load: Any,
) -> None:
    entrants = load("entrants")
    ours = replace(
        BF16,
        memory_format="channels_last",
        float32_modules=("head",),
        knobs={"keep_memory": True, "implicit_bfloat16": True},
    )
    theirs = Recipe(Policy.MIXED_FLOAT16, 512, loss_scale=LossScale())
    found = entrants.with_knobs_of(ours, theirs)
    assert (found.policy, found.batch_size, found.loss_scale) == (
        theirs.policy,
        512,
        theirs.loss_scale,
    )
    assert found.memory_format == "channels_last"
    assert found.knobs == {"keep_memory": True}
    assert found.float32_modules == ()
    same = entrants.with_knobs_of(ours, replace(BF16, batch_size=512))
    assert same.knobs == ours.knobs
    assert same.float32_modules == ("head",)
    assert entrants.in_plain_float32(ours).knobs == {"keep_memory": True}


def test_a_rivals_process_keeps_its_memory_from_the_start_and_ours_does_not(load: Any) -> None:
    entrants = load("entrants")
    from autoprec.workers.client import WorkerSettings

    started = []

    class Fake:
        alive, pid = True, 1

        def __init__(self, settings: Any) -> None:
            started.append(dict(settings.environment))

        def load(self, progress: Any) -> None:
            pass

        def call(self, method: str, **arguments: Any) -> None:
            pass

        def kill(self) -> None:
            pass

    settings = WorkerSettings(Path("mlp.py"), environment={"A": "1"})
    runner = entrants.KeptRunner(settings, lambda phase, step: None, Fake)
    for kept in (False, True, True, False):
        runner.call("open", recipe=entrants.Entrant(BF16, kept).marked)
    kept_too = {"A": "1", **entrants.KEPT}
    assert started == [{"A": "1"}, kept_too, {"A": "1"}]
    both = {entrants.Entrant(BF16, kept).marked.key() for kept in (False, True)}
    assert len(both) == 2
    rivals = load("rivals")
    assert rivals.environment("lightning") == dict(rivals.KEPT)
    assert rivals.environment(rivals.OURS) == {}


# The soak -----------------------------------------------------------------------------------------


def test_a_trial_that_was_said_and_is_not_kept_is_missing(load: Any) -> None:
    place = load("soak_place")
    said = Counter(["float32, batch 8", "mixed_bfloat16, batch 64 in 2 micro-batches of 32"])
    assert place.missing_trials(said, Counter({("float32", 8): 1, ("mixed_bfloat16", 32): 1})) == []
    lost = place.missing_trials(said, Counter({("float32", 8): 1}))
    assert lost == ["mixed_bfloat16, batch 32"]
    twice = Counter(["float32, batch 8", "float32, batch 8, memory kept"])
    assert place.missing_trials(twice, Counter({("float32", 8): 1})) == ["float32, batch 8"]
    with pytest.raises(ValueError, match="expected a recipe such as"):
        place.missing_trials(Counter(["?"]), Counter())


def test_what_a_journal_holds_is_counted(load: Any, tmp_path: Path) -> None:
    from autoprec.tuning.study import Study

    place = load("soak_place")
    study = Study(str(tmp_path / "a.journal"), "name")
    study.set_space(SPACE)
    for point in SPACE.points()[:3]:
        trial, asked = study.ask(point)
        study.tell(trial, outcome(asked, 2.0))
    study.ask(SPACE.points()[5])  # said by nobody to have finished
    kept = place.kept_trials(tmp_path / "a.journal")
    assert sum(kept.values()) == 3
    assert kept["float32", 8] == 2


def test_a_file_that_nobody_knows_is_half_written(load: Any, tmp_path: Path) -> None:
    place = load("soak_place").Place("simulated", tmp_path / "s", random.Random(0))
    place.clean()
    for name in (place.journal.name, f"{place.journal.name}.lock", place.profile.name):
        (place.folder / name).write_text("")
    assert place.strangers() == []
    (place.folder / ".task.profile.yaml.x1").write_text("")
    assert place.strangers() == [".task.profile.yaml.x1"]


def test_faults_are_shared_out_over_the_seeds(load: Any) -> None:
    assert load("soak").shared_out(10, 4) == [3, 3, 2, 2]


def test_what_is_wrong_when_a_tuning_has_ended_is_laid_to_its_last_fault(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = load("soak")
    profile = tmp_path / "task.profile.yaml"
    profile.write_text("recipe: {policy: float32}\n")
    left = SimpleNamespace(
        framework="torch",
        journal=tmp_path / "journal",
        profile=profile,
        strangers=lambda: [".half"],
        survivors=lambda: ["a worker"],
    )
    monkeypatch.setattr(module, "kept_trials", lambda journal: Counter({("float32", 8): 1}))
    soak = module.Soak(left, random.Random(0))
    soak.counts["SIGKILL"] = module.Count(injected=1, survived=1)
    soak._last = ("SIGKILL", True)
    soak._compare(Counter(["float32, batch 8", "float32, batch 16"]))
    assert vars(soak.counts["SIGKILL"]) == {
        "injected": 1,
        "survived": 0,
        "trials_lost": 0,
        "missing": 1,
        "half_written": 1,
        "survivors": 1,
    }
    assert "missing ['float32, batch 16']" in soak.problems[0]


def test_the_report_of_a_soak_names_no_cause(load: Any, tmp_path: Path) -> None:
    counts = {"injected": 2, "survived": 1, "trials_lost": 0, "half_written": 0, "survivors": 0}
    older = {"framework": "torch", "faults": {"SIGINT": counts}, "problems": ["SIGINT: exit -2"]}
    path = tmp_path / "soak.json"
    path.write_text(json.dumps({"seed": 1, "soaks": [older]}))
    lines = list(load("report_proof").soak(path))
    assert "| torch | 1 | 2 | 1 | 0 | not looked for | 0 | 0 |" in lines
    assert lines[-1] == "Not survived, torch: SIGINT."
    now = {**older, "seed": 3, "faults": {"SIGINT": {**counts, "missing": 1}}, "problems": []}
    path.write_text(json.dumps({"soaks": [now]}))
    assert list(load("report_proof").soak(path))[-1] == "| torch | 3 | 2 | 1 | 0 | 1 | 0 | 0 |"


# The hold-out, the report and the rest ------------------------------------------------------------


def test_the_hold_out_is_four_torch_tasks_and_two_of_keras_that_are_nowhere_else(load: Any) -> None:
    module = load("holdout")
    names = [path.stem for path in module.TASKS.glob("*.py")]
    assert len(names) == 6
    assert sum(name.startswith("keras") for name in names) == 2
    here = {path.stem for path in (BENCHMARKS / "tasks").glob("*.py")}
    zoo = {path.stem for path in (BENCHMARKS.parent / "tests").rglob("*.py")}
    assert set(names).isdisjoint(here | zoo)
    said = (BENCHMARKS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "no change of the tuner may be developed on" in said


def test_a_task_of_the_hold_out_that_fails_is_a_row(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = load("holdout")

    def fail(*_: object) -> None:
        raise RuntimeError("autoprec tune ended with 3: no feasible recipe")

    monkeypatch.setattr(module, "tuned", fail)
    found = module.measure(module.TASKS / "click_through.py", SimpleNamespace(tune=[]))
    assert found["failed"].endswith("no feasible recipe")
    path = tmp_path / "holdout.json"
    path.write_text(json.dumps({"date": "2026-12-01", "family": "amd-zen4", "rows": [found]}))
    lines = list(load("report_search").holdout(path))
    assert "| click_through | torch | failed: autoprec tune ended with 3" in lines[-1]


def test_the_report_of_the_overhead_says_what_is_promised_and_what_is_kept(
    load: Any, tmp_path: Path
) -> None:
    fit = load("overhead_fit")
    pairs = [fit.Pair(s, s * 1.02, s, 8) for s in (0.001, 0.005)]
    found = {
        "date": "2026-12-01",
        "family": "amd-zen4",
        "processes": 6,
        "cases": [fit.case(fit.TORCH, "float32", [pair] * 6) for pair in pairs],
        "fixed": [fit.fixed(fit.TORCH, "float32", [pairs] * 6)],
    }
    path = tmp_path / "overhead.json"
    path.write_text(json.dumps(found))
    lines = list(load("report_speed").overhead(path))
    assert "stale or not is unknown" in lines[0]
    assert lines[-5].endswith("| +100 us (+100 to +100) | no |")
    assert lines[-6].endswith("| nothing promised |")
    assert lines[-1].endswith("at most 10 us | yes |")
    path.write_text(json.dumps([{**found["cases"][0], "overhead_microseconds": 3.0, **ratio(1)}]))
    assert "One process a case" in "\n".join(load("report_speed").overhead(path))


def test_what_cannot_be_found_in_the_readme_is_an_error(load: Any) -> None:
    with pytest.raises(SystemExit, match="no place for the table 'machines'"):
        load("report").with_table("a README", "machines", ["| a |"])


@pytest.mark.torch
def test_a_rival_gets_the_tasks_own_optimizer_with_its_weight_decay(load: Any) -> None:
    import torch

    rivals = load("rivals")
    task = rivals.load("resnet")
    made = task.build_optimizer(task.build_model())
    weight = torch.nn.Parameter(torch.ones(3))
    found = rivals.optimizer_like(made)([weight])
    assert type(found) is type(made)
    assert found.defaults == made.defaults
    assert found.defaults["weight_decay"] == 1e-4
    two = torch.optim.SGD([{"params": [weight], "lr": 0.1}, {"params": [], "lr": 0.2}])
    with pytest.raises(ValueError, match="settings of their own"):
        rivals.optimizer_like(two)
