"""Pages in a real browser: reports and the documentation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autoprec import report
from tests.integrations.chromium import Chromium, luminance
from tests.reporting.page.test_page import PROFILES

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent.parent
DESKTOP, PHONE = 1280, 390


@pytest.fixture
def browser(tmp_path: Path) -> Chromium:
    folder = tmp_path / "browser"
    folder.mkdir()
    return Chromium(folder)


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("dark", [False, True])
def test_a_report_fits_and_can_be_read(
    name: str, width: int, dark: bool, browser: Chromium
) -> None:
    layout = browser.layout(report(PROFILES[name]), width, dark=dark)
    assert layout.page_width <= layout.frame_width == width
    assert layout.height > 500
    assert (luminance(layout.background) < 0.2) is dark
    assert len(layout.texts) > 20
    for text in layout.texts:
        assert text.contrast >= 4.5, text
        assert text.size >= 9, text
    assert layout.drawings >= (3 if name == "won" else 0)


def test_a_comparison_of_profiles_fits(browser: Chromium, tmp_path: Path) -> None:
    from autoprec.profiles import save_profile

    for name, profile in PROFILES.items():
        save_profile(profile, tmp_path / f"{name}.profile.yaml")
    page = report(sorted(tmp_path.glob("*.profile.yaml")))
    for width in (DESKTOP, PHONE):
        layout = browser.layout(page, width)
        assert layout.page_width <= layout.frame_width == width


def test_a_report_loads_nothing_and_prints(browser: Chromium, tmp_path: Path) -> None:
    output = tmp_path / "r.html"
    report(PROFILES["won"], output=output)
    assert browser.loaded(output.as_uri()) == set()
    assert 1 <= browser.printed_pages(output.as_uri()) <= 6
    light, dark = (browser.picture(output.as_uri(), DESKTOP, dark=each) for each in (False, True))
    assert light.read_bytes()[:4] == b"\x89PNG"
    assert light.read_bytes() != dark.read_bytes()


def test_what_a_page_loads_is_seen(browser: Chromium, tmp_path: Path) -> None:
    """The check itself: a page with a picture from elsewhere, and one that is too wide."""
    page = tmp_path / "bad.html"
    address = "http://127.0.0.1:9/picture.png"
    page.write_text(f'<body><img src="{address}"><div style="width:3000px">x</div>')
    assert address in browser.loaded(page.as_uri())
    layout = browser.layout(page.read_text(), PHONE)
    assert layout.page_width >= 3000 > layout.frame_width


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", ROOT / "docs", folder]
    subprocess.run(command, check=True, timeout=500)
    return folder


def test_no_page_of_the_documentation_loads_anything_from_outside(
    site: Path, browser: Chromium
) -> None:
    pages = sorted(site.glob("*.html"))
    assert len(pages) > 8
    for page in pages:
        assert browser.loaded(page.as_uri()) == set(), page.name


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_every_page_of_the_documentation_fits(width: int, site: Path, browser: Chromium) -> None:
    for page in sorted(site.glob("*.html")):
        base = f'<base href="{site.as_uri()}/">'
        text = page.read_text(encoding="utf-8").replace("<head>", f"<head>{base}", 1)
        layout = browser.layout(text, width)
        assert layout.page_width <= layout.frame_width == width, page.name
