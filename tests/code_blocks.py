"""The code blocks of README and docs/, by page and order.

A test that runs one asks for it by `block`, with page and number as literals; test_code_blocks.py
finds every block that no test asks for. Blocks of `text` (what a run printed) and of Sphinx's
directives are not counted.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))

_FENCE = re.compile(r"^( *)```(\S+)\n(.*?)^ *```$", re.M | re.S)


@cache
def blocks_of(page: str) -> tuple[tuple[str, str], ...]:
    """Return the language and the text of every block of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [(match[2], match[3]) for match in _FENCE.finditer(text)]
    return tuple(each for each in found if each[0] != "text" and not each[0].startswith("{"))


def block(page: str, number: int) -> str:
    """Return the text of a page's block; the first is 0."""
    return blocks_of(page)[number][1]


def commands_in(console: str) -> list[str]:
    """Return the commands after the prompts of a console block; lines after ">" go on with one."""
    commands: list[str] = []
    for line in console.splitlines():
        if line.startswith("$ "):
            commands.append(line[2:])
        elif line.startswith("> "):
            commands[-1] += "\n" + line[2:]
    return commands
