"""A seeded mutator of our files, and the targets that must bear every mutant.

Half of the mutants are a valid file with one change, the other half have many changes or are made
of the tokens that YAML and our keys are made of. The same seed gives the same mutants.
"""

from __future__ import annotations

import random
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fuzz.example import FULL, PLAIN_FLOAT32

from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.errors import AutoprecError, ProfileError
from autoprec.hardware.catalogue import load_catalogue
from autoprec.profiles import dump_profile, parse_profile
from autoprec.yaml_files import parse_yaml

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"

#: What YAML, Python and floats are known to stumble over.
TOKENS = (
    *("", "null", "~", "true", "yes", "no", "on", "-1", "0", "1", "1e400", "-0.0", "1_000", "010"),
    *(".inf", "-.inf", ".nan", "0x" + "f" * 70, "9" * 400, "9" * 5000, "1.0e+308", "1e-320"),
    *("1:30", "1:" * 30 + "1", "2026-11-20", "2026-13-45T99:99:99Z", "=", "<<", "*", "&", "!", "%"),
    *("*a", "&a ", "&a [*a]", "!!binary aGk=", "!!set {a, b}", "!!python/name:os.system ", "!x "),
    *("!!python/object/apply:os.system ['true']", "!!timestamp 2026-01-01", "!!int x", "!!float x"),
    *("[", "]", "{", "}", "[]", "{}", "[[]]", "{a: {b: c}}", "? ", ": ", "- ", "-", "---", "..."),
    *("|", ">", "|2-\n  x", "'", '"', '"\\ud800"', '"\\x00"', "\\", "#", "\t", "\n", "\r", "\x00"),
    *("\x85", "\u2028", "\ufeff", "\x1b[31m", "\x7f", "ü", "\U0001f600", "\u202e", "a" * 3000),
    *("../../etc/passwd", "/dev/zero", "C:\\x", "file:///etc/passwd", "$(id)", "{{7*7}}", "%s%n"),
    *("(a+)+$", "[", "(?P<", "(" * 200, "9-1", "1-", "-", "²", "١", "\udcff"),
)

_WORD = re.compile(r"[^\s:,\[\]{}]+")
_VALUE = re.compile(r"(?<=: )[^\n]+")


def mutants(seed: int, valid: list[str]) -> Iterator[str]:
    """Yield mutants of the valid texts without end: every second one has exactly one change."""
    draw = random.Random(seed)
    words = sorted({word for text in valid for word in _WORD.findall(text)})
    while True:
        yield mutate(draw, draw.choice(valid), words)
        if draw.random() < 0.2:
            yield soup(draw, words)
        else:
            text = draw.choice(valid)
            for _ in range(draw.randint(2, 8)):
                text = mutate(draw, text, words)
            yield text


def soup(draw: random.Random, words: list[str]) -> str:
    """A text of nothing but tokens and known words."""
    parts = [draw.choice(draw.choice((TOKENS, words))) for _ in range(draw.randint(1, 60))]
    return draw.choice(("", " ", "\n", ": ", ", ")).join(parts)


def mutate(draw: random.Random, text: str, words: list[str]) -> str:
    """The text with one change."""
    return draw.choice(MUTATIONS)(draw, text, words)


def _replace(pattern: re.Pattern[str]) -> Callable[[random.Random, str, list[str]], str]:
    def change(draw: random.Random, text: str, words: list[str]) -> str:
        found = list(pattern.finditer(text))
        if not found:
            return text + draw.choice(TOKENS)
        place = draw.choice(found)
        new = draw.choice(TOKENS) if draw.random() < 0.7 else draw.choice(words)
        return text[: place.start()] + new + text[place.end() :]

    return change


def _number(draw: random.Random, text: str, _words: list[str]) -> str:
    found = list(re.finditer(r"-?\d+(\.\d+)?", text))
    if not found:
        return text + "1"
    place = draw.choice(found)
    value = draw.choice(
        [0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, -0.5, 1e-300, 1e300, 1e16, 3.0]
    )
    return text[: place.start()] + repr(value) + text[place.end() :]


def _insert(draw: random.Random, text: str, _words: list[str]) -> str:
    at = draw.randint(0, len(text))
    return text[:at] + draw.choice(TOKENS) + text[at:]


def _flip(draw: random.Random, text: str, _words: list[str]) -> str:
    at = draw.randrange(len(text)) if text else 0
    new = chr(draw.choice((draw.randrange(128), draw.randrange(0x3000))))
    return text[:at] + new + text[at + 1 :]


def _cut(draw: random.Random, text: str, _words: list[str]) -> str:
    start = draw.randint(0, len(text))
    return text[:start] + text[start + draw.choice((1, 5, 50, len(text))) :]


def _lines(draw: random.Random, text: str, _words: list[str]) -> str:
    lines = text.splitlines(keepends=True) or [""]
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    how = draw.randrange(4)
    if how == 0:
        del lines[one]
    elif how == 1:
        lines.insert(other, lines[one])
    elif how == 2:
        lines[one], lines[other] = lines[other], lines[one]
    else:
        lines[one] = draw.choice((" ", "  ", "\t", "- ", "? ")) + lines[one]
    return "".join(lines)


def _misspell(draw: random.Random, text: str, _words: list[str]) -> str:
    found = list(re.finditer(r"\w{3,}(?=:)", text))
    if not found:
        return text
    place = draw.choice(found)
    at = draw.randrange(place.start(), place.end() - 1)
    return text[:at] + text[at + 1] + text[at] + text[at + 2 :]


def _repeat(draw: random.Random, text: str, _words: list[str]) -> str:
    start = draw.randint(0, len(text))
    part = text[start : start + draw.choice((1, 2, 10, 200))] or draw.choice(TOKENS)
    count = draw.choice((2, 10, 1000)) if len(part) < 20 else 3
    return text[:start] + part * count + text[start:]


def _nest(draw: random.Random, text: str, _words: list[str]) -> str:
    opening, closing = draw.choice((("[", "]"), ("{a: ", "}"), ("- ", ""), ("!!seq [", "]")))
    depth = draw.choice((3, 30, 50, 2000))
    found = list(_VALUE.finditer(text))
    place = draw.choice(found) if found else None
    start, end = place.span() if place else (len(text), len(text))
    return text[:start] + opening * depth + text[start:end] + closing * depth + text[end:]


MUTATIONS: tuple[Callable[[random.Random, str, list[str]], str], ...] = (
    _replace(_WORD),
    _replace(_VALUE),
    _number,
    _insert,
    _flip,
    _cut,
    _lines,
    _misspell,
    _repeat,
    _nest,
)


# Targets ------------------------------------------------------------------------------------------


def read_profile(text: str) -> str:
    """Read a profile; what is accepted must be writable and read back the same."""
    profile = parse_profile(parse_yaml(text, "a.yaml", ProfileError), "a.yaml")
    written = dump_profile(profile)
    if parse_profile(parse_yaml(written, "a.yaml", ProfileError), "a.yaml") != profile:
        raise RuntimeError("an accepted profile does not read back as it was written")
    return "accepted"


SEEN = Observation(
    DeviceKind.CPU, name="Uno", vendor="Acme", cpu_family=25, cpu_model=200, board="Big"
)


@dataclass(frozen=True)
class CatalogueReader:
    """Reads a text as the only device file of a folder, every family in it, and matches them."""

    folder: Path

    def __call__(self, text: str) -> str:
        path = self.folder / "a.yaml"
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        load_catalogue.cache_clear()
        catalogue = load_catalogue(self.folder)
        if catalogue.families:
            catalogue.family_of(SEEN)
        return "accepted"


#: What reading anything may cost besides what its length does, in calls of functions.
MOST_CALLS = 100_000


class TooMuchWork(BaseException):
    """More calls than allowed."""


class Calls:
    """Counts calls of Python's and C's functions within a block, and ends it at too many."""

    def __init__(self, most: float) -> None:
        self.most, self.count = most, 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(None)

    def _seen(self, frame: object, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            self.count += 1
            if self.count > self.most:
                sys.setprofile(None)
                raise TooMuchWork


@dataclass
class Findings:
    """What a run of a target over many inputs found."""

    inputs: int = 0
    accepted: int = 0
    most_calls: int = 0
    dearest_input: str = ""
    failures: list[tuple[str, str]] = field(default_factory=list)

    def run(
        self, target: Callable[[str], str], text: str, *, calls: float = MOST_CALLS, each: int = 10
    ) -> None:
        """Try one input: anything but acceptance or an AutoprecError, or much work, is a failure.

        Work is counted in calls of functions, `each` of which a character may cost, and `calls` in
        all besides: a count is the same on every machine, however busy.
        """
        made = Calls(calls + each * len(text))
        try:
            with made:
                target(text)
            self.accepted += 1
        except TooMuchWork:
            pass
        except AutoprecError as error:
            if len(str(error)) > 2000:
                self.failures.append((text, f"a message of {len(str(error))} characters"))
        except BaseException as error:  # whatever it is, it is a finding
            if isinstance(error, KeyboardInterrupt):
                raise
            self.failures.append((text, f"{type(error).__name__}: {error}"[:300]))
        self.inputs += 1
        if made.count > made.most:
            self.failures.append((text, f"more than {made.most:.0f} calls"))
        if made.count > self.most_calls:
            self.most_calls, self.dearest_input = made.count, text


def peak_memory(target: Callable[[str], str], text: str) -> int:
    """The most memory, in bytes, that Python held while the target read the text."""
    tracemalloc.start()
    try:
        Findings().run(target, text, calls=float("inf"))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def valid_profiles() -> list[str]:
    """Profiles that load, as text."""
    return [dump_profile(FULL), dump_profile(PLAIN_FLOAT32)]


def valid_catalogues(devices: Path) -> list[str]:
    """Device files that need no other: a small one with everything in it, and a real one."""
    paths = (HERE / "devices.yaml", devices / "generic.yaml")
    return [path.read_text(encoding="utf-8") for path in paths]
