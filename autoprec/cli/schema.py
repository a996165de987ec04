"""`autoprec schema`: the JSON Schema of profile files, for editors and CI."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from autoprec.errors import UsageError

_EXAMPLES = """\
examples:
  autoprec schema -o autoprec.schema.json
  check-jsonschema --schemafile autoprec.schema.json *.profile.yaml

Profiles written next to an autoprec.schema.json, or in a folder below it, begin with the line that
lets an editor check and complete them:
  # yaml-language-server: $schema=autoprec.schema.json
"""


def add_parser(subparsers: Any) -> None:
    """Add the `schema` subcommand."""
    parser = subparsers.add_parser(
        "schema",
        help="print the JSON Schema of profile files",
        description="Print the JSON Schema (draft-07) of profile files.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json", help="write it there")


def run(arguments: argparse.Namespace) -> int:
    """Print or write the schema."""
    from autoprec.core.profile.schema import profile_schema
    from autoprec.yaml_files import write_text

    text = json.dumps(profile_schema(), indent=2) + "\n"
    output = arguments.output
    if output is None:
        print(text, end="")
        return 0
    if output.suffix != ".json" or not output.parent.is_dir():
        raise UsageError(f"--output {output} given, expected FILE.json in a folder that exists")
    write_text(output, text)
    return 0
