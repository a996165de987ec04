"""The catalogue's families, and tests of laws that each of them obeys.

A law is one test: a test for each family takes a hundred times as long as the law itself.
"""

from __future__ import annotations

from collections.abc import Callable

from autoprec.core.device.family import Family
from autoprec.hardware.catalogue import load_catalogue

CATALOGUE = load_catalogue()
FAMILIES = {family.name: family for family in CATALOGUE.families}


def each_family(law: Callable[[Family], None]) -> Callable[[], None]:
    """Return the test that a law holds of every family; one that breaks it is named."""

    def test() -> None:
        for family in FAMILIES.values():
            try:
                law(family)
            except Exception as error:
                error.add_note(f"of {family.name}")
                raise

    test.__name__, test.__doc__ = law.__name__, law.__doc__
    return test
