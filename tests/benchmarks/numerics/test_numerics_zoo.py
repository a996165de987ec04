"""The table of verdicts is one for both frameworks, whose tasks share no process."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.checkout import ROOT
from benchmarks.numerics import zoo
from benchmarks.numerics.zoo_tables import share, wilson


def test_a_folder_of_tasks_is_known_by_what_its_tasks_import():
    found = {}
    for folder in zoo.FOLDERS:
        for job in zoo.jobs_of(folder, [], (0,), (), "cpu"):
            found.setdefault(job.zoo, set()).add(job.framework)
    assert found == {
        "zoo": {"torch"},
        "zoo/field": {"torch"},
        "zoo_keras": {"keras"},
        "zoo_keras/field": {"keras"},
    }


def test_what_long_runs_leave_open_is_listed():
    rows = {policy: {"label": "unclear", "why": "final loss +7 %"} for policy in zoo.JUDGED}
    rows["float16"] = {"label": "broken", "why": "not finite"}
    jobs = [zoo.Job(zoo.FIELD / "a.py", rows, (0, 1), ("confusion",))]
    assert zoo.unclear(jobs) == ["zoo/field a bfloat16: final loss +7 %"]


def test_neither_framework_is_imported_before_a_task_needs_it():
    code = (
        "import sys, benchmarks.numerics.zoo; "
        "print([name for name in ('torch', 'keras', 'tensorflow') if name in sys.modules])"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


def test_a_job_is_judged_beside_those_of_its_own_framework_only(monkeypatch):
    pools = []

    class Pool:
        def __init__(self, processes, maxtasksperchild):
            pools.append([])

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def imap(self, judge, jobs):
            pools[-1] += jobs
            return map(judge, jobs)

    class Spawned:
        def __init__(self, method):
            self.Pool = Pool

    monkeypatch.setattr(zoo, "get_context", Spawned)
    jobs = [
        job for folder in reversed(zoo.FOLDERS) for job in zoo.jobs_of(folder, [], (0,), (), "cpu")
    ]
    found = list(zoo.judged(jobs, 2, judge=lambda job: {"seen": [{"path": job.path}]}))
    assert [{job.framework for job in pool} for pool in pools] == [{"keras"}, {"torch"}]
    assert len(found) == len(jobs)


def test_shares_have_wilsons_interval():
    assert wilson(0, 0) == (0.0, 1.0)
    low, high = wilson(9, 10)
    assert (round(low, 3), round(high, 3)) == (0.596, 0.982)  # as tables of it have
    assert share([9, 10]) == "9 of 10 (90.0 %; 59.6-98.2 %)"
