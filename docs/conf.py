"""Builds the documentation: `make docs`. Pages load nothing from elsewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from device_table import device_page  # noqa: E402

from autoprec.version import __version__  # noqa: E402

project = "autoprec"
author = "The autoprec authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"autoprec {__version__}"
html_copy_source = False
html_show_copyright = False
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
default_role = "code"

#: A link to a file of the repository that is no page: on a page only its text is shown.
_ELSEWHERE = re.compile(r"\[([^\]]+)\]\((\.\./[^)]*)\)")


def _without_links_elsewhere(app: Any, name: str, source: list[str]) -> None:
    source[0] = _ELSEWHERE.sub(r"`\1`", source[0])


def _write_devices(app: Any) -> None:
    (HERE / "devices.md").write_text(device_page(), encoding="utf-8")


def setup(app: Any) -> None:
    """Connect what is done while pages are read."""
    app.connect("builder-inited", _write_devices)
    app.connect("source-read", _without_links_elsewhere)
