"""Fuzz the loaders guided by coverage: atheris changes inputs so that they reach new code.

    pip install atheris
    python -m benchmarks.faults.guided_fuzz profiles --seconds 120
    python -m benchmarks.faults.guided_fuzz catalogue --seconds 120

What raises anything but autoprec's own errors, or takes too many calls for its length, ends
the run, prints the input and leaves it in a file named after its hash.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

from benchmarks.checkout import TESTS

sys.path.insert(0, str(TESTS))

with atheris.instrument_imports(include=["autoprec", "fuzz", "yaml"]):
    from fuzz.mutation import (
        CatalogueReader,
        Findings,
        read_profile,
        valid_catalogues,
        valid_profiles,
    )

    from autoprec.hardware.catalogue import profiles_folder


def main() -> None:
    """Fuzz one loader until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loader", choices=("profiles", "catalogue"))
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="autoprec-fuzz-"))
    corpus = folder / "corpus"
    corpus.mkdir()
    if arguments.loader == "profiles":
        target, valid = read_profile, valid_profiles()
    else:
        target = CatalogueReader(folder)  # type: ignore[assignment]
        valid = valid_catalogues(profiles_folder() / "devices")
    for number, text in enumerate(valid):
        (corpus / f"{number}.yaml").write_text(text, encoding="utf-8")

    def one(data: bytes) -> None:
        findings = Findings()
        findings.run(target, data.decode("utf-8", "surrogateescape"))
        if findings.failures:
            raise RuntimeError(findings.failures[0][1])

    limits = (f"-max_total_time={arguments.seconds}", "-max_len=20000", f"-seed={arguments.seed}")
    atheris.Setup([sys.argv[0], *limits, str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
