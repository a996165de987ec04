"""Makes pages of profiles: one of a single profile, or one that compares several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autoprec.core.numerics.watching import WatchedStep
from autoprec.core.profile import Profile
from autoprec.errors import UsageError
from autoprec.profiles import dump_recipe, load_folder, load_profile
from autoprec.yaml_files import write_text

if TYPE_CHECKING:
    from autoprec.reporting.page.sections import Page


def report(
    profile: str | Path | Profile | Sequence[str | Path],
    *,
    output: str | Path | None = None,
    watched: Sequence[WatchedStep] = (),
) -> Page:
    """Return a page (HTML) about a profile, or one that compares several by device.

    `profile` is a profile or its file; a folder of profiles, or several files, are compared. The
    page holds its drawings, loads nothing and runs no script. It is written to `output`, a path
    that ends in .html, if that is given; a notebook shows the result as it is. `watched` are the
    checks of a training under a single profile (`precision.watched`), which the page then lists.
    """
    from autoprec.reporting.page.sections import page_of, page_of_several

    if output is not None:
        check_report_path(Path(output))
    if isinstance(profile, str | Path):
        path = Path(profile)
        known: Profile | dict[str, Profile] = (
            load_folder(path) if path.is_dir() else load_profile(path)
        )
    elif isinstance(profile, Profile):
        known = profile
    else:
        known = {str(each): load_profile(each) for each in profile}
    if isinstance(known, Profile):
        page = page_of(known, dump_recipe(known.recipe), watched)
    elif watched:
        raise UsageError(
            f"`watched` given with {len(known)} profiles, expected the one profile that the "
            "training was under"
        )
    else:
        page = page_of_several(known)
    if output is not None:
        write_text(Path(output), page)
    return page


def check_report_path(path: Path) -> Path:
    """Return where a page will be written; raise `UsageError` where it cannot be."""
    if path.suffix not in (".html", ".htm") or path.is_dir():
        raise UsageError(f"`output` {path} given, expected a file ending in .html")
    if not path.parent.is_dir():
        raise UsageError(f"`output` {path} given, but there is no folder {path.parent}")
    return path
