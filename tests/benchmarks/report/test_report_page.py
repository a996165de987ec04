"""The page and the README's tables are what the report makes of the results."""

from __future__ import annotations

import pytest

from benchmarks.report import page


def test_the_pages_are_what_the_report_makes_of_the_results() -> None:
    """So a result that has become stale is marked as such: the report says it, and must be run."""
    again = "run python -m benchmarks.report and commit what it writes"
    unknown = "stale or not is unknown"
    made, kept = page.page(), page.PAGE.read_text(encoding="utf-8")
    pairs = list(zip(made.splitlines(), kept.splitlines(), strict=False))
    assert len(made.splitlines()) == len(kept.splitlines()), again
    assert [p for p in pairs if p[0] != p[1] and unknown not in p[0]] == [], again
    readme = page.README.read_text(encoding="utf-8")
    assert page.readme(readme) == readme, again
    beyond = [p[1] for p in pairs if p[0] != p[1]]
    if beyond:
        pytest.skip(f"stale unknown: this copy has not the history that {beyond} speaks of")


def test_what_cannot_be_found_in_the_readme_is_an_error() -> None:
    with pytest.raises(SystemExit, match="no place for the table 'machines'"):
        page.with_table("a README", "machines", ["| a |"])
