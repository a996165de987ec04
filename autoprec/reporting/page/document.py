"""The whole page: sections between a head and an end, with a style for light, dark and print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from autoprec.core.numerics.watching import WatchedStep
from autoprec.core.profile import Profile
from autoprec.reporting.page import sections
from autoprec.reporting.page.markup import text
from autoprec.version import __version__

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --dim: #5b6472; --line: #d9dee6; --paper: #fff;
  --soft: #f3f5f8; --float32: #6b7280; --tf32: #0f8a5f; --mixed_bfloat16: #2563eb;
  --mixed_float16: #d9580d; --noise: #b9bfc9; --part: #5b8def; --whole: #1d4ed8; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --dim: #a2abb9; --line: #3a4250;
  --paper: #14181f; --soft: #1d232c; --float32: #9aa3b2; --tf32: #41c393; --mixed_bfloat16: #6ea0ff;
  --mixed_float16: #ff9a57; --noise: #596273; --part: #4775d1; --whole: #8fb4ff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 60rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .2rem 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2.2rem 0 .6rem; padding-top: .8rem;
  border-top: 1px solid var(--line); }
p { margin: .4rem 0; } .task, figcaption, footer { color: var(--dim); font-size: .9rem; }
.answer { font-size: 1.25rem; font-weight: 600; }
figure { margin: .6rem 0; } .wide { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 32rem; max-width: 46rem; font-size: 12px; }
svg text { fill: var(--ink); } svg .title, svg .small { fill: var(--dim); }
svg .small { font-size: 11px; } svg .axis { stroke: var(--dim); } svg .grid { stroke: var(--line); }
svg .curve { fill: none; stroke-width: 2; } svg .cross { fill: none; stroke-width: 2; }
svg .ring { fill: none; stroke: var(--ink); stroke-width: 2; } svg .whisker { stroke: var(--ink); }
svg .part { fill: var(--part); } svg .whole { fill: var(--whole); }
svg .range { fill: var(--line); }
svg .float32 { --own: var(--float32); } svg .tf32 { --own: var(--tf32); }
svg .mixed_bfloat16 { --own: var(--mixed_bfloat16); } svg .candidate { --own: var(--whole); }
svg .mixed_float16 { --own: var(--mixed_float16); } svg .noise { --own: var(--noise); }
svg .curve, svg .cross { stroke: var(--own, var(--ink)); } svg circle { fill: var(--own); }
svg circle.ring { fill: none; } svg .noise.curve { stroke-width: 6; }
svg .reference { --own: var(--float32); } svg .reference.curve { stroke-width: 4; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; vertical-align: top;
  padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } .facts th { font-weight: 400; color: var(--dim); white-space: nowrap; }
td:first-child { white-space: nowrap; } td code { overflow-wrap: normal; }
.n { text-align: right; font-variant-numeric: tabular-nums; } td.n { white-space: nowrap; }
pre { background: var(--soft); padding: .8rem 1rem; overflow-x: auto; font-size: .85rem; }
code { overflow-wrap: anywhere; } ul { margin: .4rem 0; padding-left: 1.2rem; }
.meter { display: inline-block; width: 8rem; height: .7rem; background: var(--line);
  vertical-align: baseline; }
.meter span { display: block; height: 100%; background: var(--part); }
.key { display: inline-block; width: .6rem; height: .6rem; margin-right: .4rem;
  border-radius: 50%; }
.key.float32 { background: var(--float32); } .key.tf32 { background: var(--tf32); }
.key.mixed_bfloat16 { background: var(--mixed_bfloat16); }
.key.mixed_float16 { background: var(--mixed_float16); }
@media (max-width: 40rem) { .facts th { white-space: normal; } h1 { font-size: 1.25rem; } }
@media print { body { max-width: none; font-size: 11pt; } section { break-inside: avoid; }
  pre, .wide { overflow: visible; } svg { min-width: 0; } }
"""


class Page(str):
    """HTML text of a whole page. A notebook shows it in a frame, so that styles do not mix."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{escape(self)}" style="width:100%;height:50rem;border:0"></iframe>'


def page_of(profile: Profile, written: str, watched: Sequence[WatchedStep] = ()) -> Page:
    """Return the report of a profile; `written` is its recipe as YAML.

    `watched` are the checks of a training under it.
    """
    return _document(profile.task.file, sections.all_of(profile, written, watched))


def page_of_several(profiles: Mapping[str, Profile]) -> Page:
    """Return a page that compares profiles, by their file names."""
    order = sorted(profiles, key=lambda name: (profiles[name].task.file, name))
    table = sections.comparison({name: profiles[name] for name in order})
    return _document("profiles", ["<header><h1>Profiles</h1></header>", table])


def _document(title: str, parts: Iterable[str]) -> Page:
    body = "\n".join(part for part in parts if part)
    return Page(
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}: autoprec</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{body}\n<footer>Made by autoprec {__version__} from the profile alone.</footer>\n"
        "</body>\n</html>\n"
    )
