"""What `--json` prints: a result on stdout, as JSON."""

from __future__ import annotations

import json
import sys

from autoprec.core.codec import to_plain


def print_json(value: object) -> None:
    """Print a value, dataclasses included, as JSON."""
    json.dump(to_plain(value), sys.stdout, indent=2)
    print()
