"""A page as text that a notebook shows."""

from __future__ import annotations

from html import escape


class Page(str):
    """HTML text of a whole page. A notebook shows it in a frame, so that styles do not mix."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(self)}" style="width:100%;height:50rem;border:0"></iframe>'
