"""What SECURITY.md says is never done is not in the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import autoprec

PACKAGE = Path(autoprec.__file__).parent

#: Modules that open network connections, and those that run code from data.
NETWORK = {
    *("urllib", "http", "ftplib", "smtplib", "imaplib", "poplib", "telnetlib", "xmlrpc"),
    *("socketserver", "requests", "httpx", "aiohttp", "urllib3", "webbrowser", "asyncio"),
}
CODE_FROM_DATA = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}

FORBIDDEN_CALLS = {
    *("eval", "exec", "os.system", "os.popen", "pty.spawn", "yaml.load", "yaml.full_load"),
    *("yaml.unsafe_load", "torch.load", "torch.save", "np.load", "numpy.load"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "socket.create_connection"),
}

#: What SECURITY.md excepts: asking whether the cluster that the user named answers, and objects
#: that were given to `tune`, which travel to its own workers.
EXCEPTED = {
    "fleet/ray_scheduler.py": ["socket.create_connection"],
    "workers/sent_objects.py": ["pickle", "cloudpickle"],
}

SOURCES = sorted(PACKAGE.rglob("*.py"))


def found_in(text: str) -> Iterator[str]:
    """What a source does that is never done."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").partition(".")[0]] if not node.level else []
        else:
            names = []
        yield from (name for name in names if name in NETWORK | CODE_FROM_DATA)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            weights = any(ast.unparse(each) == "weights_only=True" for each in node.keywords)
            if name in FORBIDDEN_CALLS and not (name == "torch.load" and weights):
                yield name
            for keyword in node.keywords:
                true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("shell", "allow_pickle") and true:
                    yield f"{keyword.arg}=True"
            if name.endswith(".connect"):
                yield name


def test_no_source_does_what_is_never_done() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): list(found_in(path.read_text(encoding="utf-8")))
        for path in SOURCES
    }
    assert {name: calls for name, calls in found.items() if calls} == EXCEPTED


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from urllib.request import urlopen",
        "import http.client",
        "eval(text)",
        "import subprocess\nsubprocess.run(text, shell=True)",
        "yaml.load(text, Loader)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text, weights_only=True)",
        "np.load(path, allow_pickle=True)",
        "connection.connect(address)",
    ],
)
def test_the_test_can_fail(text: str) -> None:
    assert list(found_in(text))
