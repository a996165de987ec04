"""Accelerators that autoprec recognises but does not tune, read strictly from a data file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from autoprec.core.codec import DecodeError, from_plain
from autoprec.errors import CatalogueError
from autoprec.hardware.catalogue import profiles_folder
from autoprec.yaml_files import read_yaml


@dataclass(frozen=True)
class OtherAccelerator:
    """One product: its PCI ids ("1da3:1020"), and what to use instead of autoprec."""

    title: str
    pci: tuple[str, ...]
    advice: str
    source: str


@dataclass(frozen=True)
class _Document:
    accelerators: tuple[OtherAccelerator, ...]


@cache
def load_other_accelerators() -> tuple[OtherAccelerator, ...]:
    """Read all of them; raise `CatalogueError` with the file and the problem."""
    path = profiles_folder() / "other_accelerators.yaml"
    try:
        return from_plain(_Document, read_yaml(path, CatalogueError)).accelerators
    except DecodeError as error:
        raise CatalogueError(f"{path}: {error}") from error
