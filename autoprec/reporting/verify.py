"""`autoprec verify` on the terminal: what it is doing, on stderr, and each claim."""

from __future__ import annotations

import sys

from autoprec.core.profile_claims import Verification
from autoprec.reporting.flags import with_flags
from autoprec.reporting.text import printable, stage_text
from autoprec.tuning.events import Event, Note, Stage


class Lines:
    """Prints every stage and note as a line on stderr."""

    def __call__(self, event: Event) -> None:
        """Print one event."""
        match event:
            case Stage():
                self._say(stage_text(event.name, event.detail))
            case Note():
                self._say(f"{'warning: ' if event.warning else ''}{with_flags(event.text)}")

    def _say(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)


def claim_lines(found: Verification) -> list[str]:
    """Return a line for each claim, and one that says what follows."""
    lines = [
        f"{each.name}: {each.result}: {each.stated} was stated, found: {each.found}"
        for each in found.claims
    ]
    if found.failed:
        names = " and ".join(each.name for each in found.failed)
        lines.append(f"the profile's claim of {names} fails: tune again on this machine")
    elif any(each.result == "unresolved" for each in found.claims):
        lines.append("no claim fails, but not all could be decided: repeat it on an idle machine")
    else:
        lines.append("every claim holds")
    return [printable(line) for line in lines]
