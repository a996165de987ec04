"""A headless Chromium: what a page looks like there, and what it loads."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_SECONDS = 120

#: What a network log has as the initiator of a request that no page made.
_BROWSER = "not an origin"

#: Shows the page in a frame of the width asked for, measures it, and leaves what it found as text.
#: A page that is looked at may hold scripts of its own (the documentation's), so it is framed as
#: text of the same origin.
_HARNESS = """<!doctype html><meta charset="utf-8"><body><script>
const frame = document.createElement("iframe");
frame.style = "border:0;height:900px;width:{width}px";
frame.srcdoc = {page};
frame.onload = () => {{
  const inside = frame.contentWindow, root = inside.document.documentElement;
  const colour = (element, name) => inside.getComputedStyle(element)[name];
  const texts = [...root.querySelectorAll("body *")].filter(element =>
    element.getClientRects().length && !["STYLE", "SCRIPT"].includes(element.tagName)
    && [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  const behind = element => {{
    for (let each = element; each; each = each.parentElement) {{
      const found = colour(each, "backgroundColor");
      if (!/, 0\\)$|transparent/.test(found)) return found;
    }}
    return "rgb(255, 255, 255)";
  }};
  const found = {{
    page_width: root.scrollWidth,
    frame_width: root.clientWidth,
    height: root.scrollHeight,
    background: behind(inside.document.body),
    drawings: root.querySelectorAll("svg").length,
    texts: texts.map(element => ({{
      text: element.textContent.trim().slice(0, 60),
      colour: colour(element, element.closest("svg") ? "fill" : "color"),
      behind: behind(element),
      in_drawing: !!element.closest("svg"),
      size: parseFloat(colour(element, "fontSize")),
    }})),
  }};
  const output = document.createElement("pre");
  output.id = "found";
  output.textContent = JSON.stringify(found);
  frame.remove();
  document.body.append(output);
}};
document.body.append(frame);
</script>"""


@dataclass(frozen=True)
class Text:
    """A piece of text as it is shown."""

    text: str
    colour: str
    behind: str
    in_drawing: bool
    size: float

    @property
    def contrast(self) -> float:
        """The contrast ratio of WCAG 2 with what is behind it, from 1 to 21."""
        one, other = sorted((luminance(self.colour), luminance(self.behind)))
        return (other + 0.05) / (one + 0.05)


@dataclass(frozen=True)
class Layout:
    """How a page is laid out at one width, in pixels."""

    page_width: int
    frame_width: int
    height: int
    background: str
    drawings: int
    texts: tuple[Text, ...]


class Chromium:
    """Runs the browser, each time with a new user folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        found = next(filter(None, map(shutil.which, _NAMES)), None)
        if found is None:
            pytest.fail("no Chromium on the PATH; install one (Debian: apt install chromium)")
        self._program = found

    def run(self, *flags: str, dark: bool = False) -> str:
        """Run it with flags and return what it printed."""
        user = self._folder / f"user{len(list(self._folder.iterdir()))}"
        user.mkdir()
        command = [
            *(
                self._program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
            ),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *("--disable-sync", "--disable-default-apps", f"--user-data-dir={user}"),
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *flags,
        ]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        assert ended.returncode == 0, f"{command}\n{ended.stderr}"
        return ended.stdout

    def layout(self, page: str, width: int, *, dark: bool = False) -> Layout:
        """Lay a page (HTML text) out at a width, and measure it."""
        harness = self._folder / f"harness{len(list(self._folder.iterdir()))}.html"
        text = json.dumps(page).replace("</", "<\\/").replace("<!--", "<\\u0021--")
        harness.write_text(_HARNESS.format(width=width, page=text), encoding="utf-8")
        printed = self.run("--dump-dom", "--virtual-time-budget=5000", harness.as_uri(), dark=dark)
        found = re.search(r'<pre id="found">(.*?)</pre>', printed, re.S)
        assert found, printed[-2000:]
        plain: dict[str, Any] = json.loads(html.unescape(found[1]))
        texts = tuple(Text(**each) for each in plain.pop("texts"))
        return Layout(texts=texts, **plain)

    def loaded(self, address: str) -> set[str]:
        """Return the web addresses that a page asks for, without the browser's own requests."""
        log = self._folder / f"net{len(list(self._folder.iterdir()))}.json"
        self.run("--dump-dom", "--virtual-time-budget=5000", f"--log-net-log={log}", address)
        events = json.loads(log.read_text(encoding="utf-8"))["events"]
        asked = [event.get("params", {}) for event in events]
        return {
            each["url"]
            for each in asked
            if each.get("initiator", _BROWSER) != _BROWSER and each["url"].startswith("http")
        }

    def picture(self, address: str, width: int, *, dark: bool = False) -> Path:
        """Take a picture of a page's first screen (PNG)."""
        file = self._folder / f"picture{len(list(self._folder.iterdir()))}.png"
        self.run(f"--screenshot={file}", f"--window-size={width},1200", address, dark=dark)
        return file

    def printed_pages(self, address: str) -> int:
        """Return how many pages a page prints on."""
        file = self._folder / f"printed{len(list(self._folder.iterdir()))}.pdf"
        self.run(f"--print-to-pdf={file}", "--no-pdf-header-footer", address)
        return len(re.findall(rb"/Type\s*/Page\b", file.read_bytes()))


def luminance(colour: str) -> float:
    """Return the relative luminance (WCAG 2) of a CSS colour "rgb(r, g, b)"."""
    parts = re.findall(r"[\d.]+", colour)
    channels = [float(part) / 255 for part in parts[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
