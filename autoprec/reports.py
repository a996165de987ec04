"""Makes pages of profiles: one of a single profile, or one that compares several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from autoprec.core.numerics.watching import WatchedStep
from autoprec.core.profile import Profile
from autoprec.errors import UsageError
from autoprec.profiles import dump_recipe, load_folder, load_profile
from autoprec.yaml_files import write_text

if TYPE_CHECKING:
    from autoprec.reporting.page.shown import Page


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
    from autoprec.reporting.page.document import page_of, page_of_several
    from autoprec.reporting.page.shown import Page

    if output is not None:
        check_report_path(Path(output))
    several: Mapping[str, Profile] | None = None
    if isinstance(profile, Profile):
        single = profile
    elif isinstance(profile, str | Path):
        path = Path(profile)
        if path.is_dir():
            several = load_folder(path)
        else:
            single = load_profile(path)
    else:
        several = {str(each): load_profile(each) for each in profile}
    if several is not None:
        if watched:
            raise UsageError(
                f"`watched` given with {len(several)} profiles, expected the one profile that the "
                "training was under"
            )
        page = Page(page_of_several(several))
    else:
        page = Page(page_of(single, dump_recipe(single.recipe), watched))
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
