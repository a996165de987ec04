"""Record this machine for the replay tests.

    python -m benchmarks.recordings.record "what it is" > profiles/recordings/FAMILY.json

stderr shows the family to name the file after, and what the catalogue and the rules conclude about
the machine: check that before you commit the file, because from then on a test expects it.
"""

from __future__ import annotations

import json
import sys

from autoprec.core.codec import to_plain
from autoprec.core.device.merging import merge
from autoprec.core.device.policies import propose
from autoprec.core.dtypes import DType
from autoprec.hardware.catalogue import load_catalogue
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes.observe import observe
from benchmarks.recordings.machine_recorder import Recorder
from benchmarks.recordings.machine_replay import Expectation, Recording


def record(note: str) -> tuple[str, Recording]:
    """Record this machine; return the family expected, and the recording."""
    recorder = Recorder(Machine())
    first = observe(recorder).devices[0]
    facts = merge(first, load_catalogue().family_of(first))
    support = {dtype: facts.fact(dtype).support for dtype in DType}
    expect = Expectation(propose(facts).recommended, support)
    return facts.family, recorder.recording(note, expect)


def main() -> int:
    """Print the recording of this machine as JSON."""
    if len(sys.argv) != 2:
        print(
            'usage: python -m benchmarks.recordings.record "what machine this is"', file=sys.stderr
        )
        return 2
    family, recording = record(sys.argv[1])
    print(f"family {family}; expected: {to_plain(recording.expect)}", file=sys.stderr)
    json.dump(to_plain(recording), sys.stdout, indent=1, ensure_ascii=False)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
