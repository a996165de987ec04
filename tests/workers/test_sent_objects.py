"""Objects travel in a file that is gone afterwards; what cannot travel is named."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from autoprec.errors import UsageError
from autoprec.workers.sent_objects import name_of, receive, sent

pytest.importorskip("cloudpickle")

LOCK = threading.Lock()


class Net:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def test_a_function_travels_with_what_it_uses(tmp_path: Path) -> None:
    rate = 3

    def build() -> int:
        return rate + 1

    with sent(build, tmp_path) as path:
        assert path.name == "build.pickle"
        assert receive(path)() == 4
    assert not path.exists()


def test_equal_objects_are_sent_to_the_same_place(tmp_path: Path) -> None:
    places = []
    for size in (1, 1, 2):
        with sent({"model": [size]}, tmp_path) as path:
            places.append(path)
    assert places[0] == places[1] != places[2]


def test_only_the_user_can_read_what_is_sent(tmp_path: Path) -> None:
    with sent({"model": [1]}, tmp_path) as path:
        assert path.stat().st_mode & 0o077 == 0
        assert path.parent.stat().st_mode & 0o077 == 0
        with sent({"model": [1]}, tmp_path) as again:  # in another program, at the same time
            assert again == path
        assert receive(path) == {"model": [1]}
    assert not path.parent.exists()


def test_the_last_of_two_tunings_deletes_what_both_use(tmp_path: Path) -> None:
    one, other = (sent({"model": [1]}, tmp_path) for _ in range(2))
    path = one.__enter__()
    assert other.__enter__() == path
    one.__exit__(None, None, None)
    assert receive(path) == {"model": [1]}
    other.__exit__(None, None, None)
    assert not path.parent.exists()


def test_what_a_killed_tuning_left_is_written_again_and_deleted(tmp_path: Path) -> None:
    with sent({"model": [1]}, tmp_path) as path:
        pass
    path.parent.mkdir()
    path.write_bytes(b"half")
    with sent({"model": [1]}, tmp_path) as again:
        assert again == path
        assert receive(path) == {"model": [1]}
    assert not path.parent.exists()


def test_without_a_cache_a_folder_of_its_own_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with sent([1], None) as path:
        assert path.parent.parent == tmp_path
    assert not list(tmp_path.iterdir())


def test_a_file_is_found_that_the_notebook_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "notebooks_module.py").write_text("def build(): return 5\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    import notebooks_module  # type: ignore[import-not-found]

    with sent(notebooks_module.build, tmp_path) as path:
        monkeypatch.undo()
        monkeypatch.setattr(sys, "path", list(sys.path))
        sys.modules.pop("notebooks_module")
        assert receive(path)() == 5
    sys.modules.pop("notebooks_module")


def locked() -> Any:
    lock = threading.Lock()
    return lambda: lock


UNSENT = [
    (Net(encoder=Net(head=LOCK)), "net.encoder.head is a lock"),
    ((Net(), [1, {"a": LOCK}]), "net[1][1]['a'] is a lock"),
    (locked(), "lock is a lock"),
    (Net(step=Net(lock=LOCK).__init__), "net.step.__self__.lock is a lock"),
]


@pytest.mark.parametrize(("objects", "message"), UNSENT, ids=[each[1] for each in UNSENT])
def test_what_cannot_travel_is_named_by_the_way_to_it(
    tmp_path: Path, objects: Any, message: str
) -> None:
    with pytest.raises(UsageError) as caught, sent(objects, tmp_path):
        pass
    assert message in str(caught.value)
    assert "Give a function that makes" in str(caught.value)
    assert not list(tmp_path.rglob("*.pickle"))


def test_what_is_on_an_accelerator_is_to_be_moved(tmp_path: Path) -> None:
    weight = Net(requires_grad=True, device=Net(type="cuda"))
    message = r"net\.weight is a Net.*Move it to the CPU"
    with pytest.raises(UsageError, match=message), sent(Net(weight=weight), tmp_path):
        pass


def test_names_are_of_functions_models_and_modules() -> None:
    trainer = type("Trainer", (), {})()
    assert name_of(locked) == "locked"
    assert name_of((Net(), 1, 2, 3)) == "net"
    assert name_of({"model": Net()}) == "net"
    assert name_of((trainer, Net())) == "net"
    assert name_of(Net(model=Net())) == "net"


def test_cloudpickle_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    message = r"pip install 'autoprec\[notebook\]'"
    with pytest.raises(UsageError, match=message), sent(Net(), tmp_path):
        pass
