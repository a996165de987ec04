"""That padding was chosen in no recorded tuning is said in docs/method.md; here it is looked up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.checkout import RESULTS, ROOT


def recipes(value: Any) -> Iterator[dict[str, Any]]:
    """Every recipe in a result, however deep."""
    if isinstance(value, dict):
        if isinstance(value.get("alignment"), dict) and "policy" in value:
            yield value
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from recipes(each)


def test_no_recorded_recipe_is_padded_as_long_as_the_page_says_so() -> None:
    texts = [
        text
        for path in RESULTS.glob("*.json*")
        for text in ([path.read_text()] if path.suffix == ".json" else path.read_text().split("\n"))
        if text
    ]
    found = [recipe for text in texts for recipe in recipes(json.loads(text))]
    assert len(found) > 500
    padded = [each for each in found if each["alignment"]["modules"]]
    said = "In no recorded tuning of ours was it chosen" in (ROOT / "docs/method.md").read_text()
    assert said is (not padded)
