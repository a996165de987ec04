"""Runs a training script as it is, records its first updates, and ends it there.

Run as a program, with its settings as one argument. It is no worker: profiles are applied as the
script applies them. Times are of whole updates, with the script's own loader, schedule and logging;
losses are sums of what went backward, before any loss scale.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RecordedRun:
    """The first updates of one run: the seconds of one, its loader's part of them, all losses.

    `profiles` are what the script applied, `ended` says that it ended by itself after `updates`.
    """

    seconds: float
    loader_seconds: float
    losses: tuple[float, ...]
    profiles: tuple[str, ...] = ()
    ended: bool = False
    updates: int = 0


@dataclass
class _Recorder:
    """Counts updates; writes what it saw after the last one, and ends the process."""

    updates: int
    write_to: Path
    times: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    profiles: list[str] = field(default_factory=list)
    _waited: float = 0.0
    _loss: Any = None
    _scaled: bool = False

    def install(self) -> None:
        """Change what trains, where it is imported."""
        from autoprec.workers.training_calls import patch_on_import

        patch_on_import(
            {
                "torch.optim.optimizer": lambda module: module.register_optimizer_step_post_hook(
                    lambda *_: self.update()
                ),
                "torch.autograd": self._record_backward,
                "torch.utils.data.dataloader": self._record_loader,
                "keras.src.models.model": self._record_keras,
                "autoprec.backends.torch.apply.loss_scaler": self._record_scaler,
                "autoprec.applying": self._record_profiles,
            }
        )

    @staticmethod
    def warm_up(updates: int) -> int:
        """Return after how many of them timing begins: before, kernels are chosen and compiled."""
        return max(1, updates // 4)

    def update(self, loss: Any = None, count: int = 1) -> None:
        """Note the end of an update, or of several that ran as one."""
        before = len(self.losses)
        self.losses += [self._loss if loss is None else loss] * count
        self._loss = None
        over = len(self.losses) >= self.updates
        if over or before < self.warm_up(self.updates) <= len(self.losses):
            _wait_for_device()
        self.times += [time.perf_counter()] * count
        self.waits += [self._waited] * count
        if over:
            self.write(ended=False)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def write(self, *, ended: bool) -> None:
        """Write what was recorded, as the fields of `RecordedRun`."""
        first = self.warm_up(len(self.losses)) - 1
        timed = sum(each > self.times[first] for each in self.times[first:])
        said = {
            "seconds": (self.times[-1] - self.times[first]) / timed if timed > 0 else 0.0,
            "loader_seconds": (self.waits[-1] - self.waits[first]) / timed if timed > 0 else 0.0,
            "losses": [float(each) for each in self.losses if each is not None],
            "profiles": sorted(set(self.profiles)),
            "ended": ended,
            "updates": len(self.losses),
        }
        self.write_to.write_text(json.dumps(said), encoding="utf-8")

    def _record_backward(self, module: Any) -> None:
        original = module.backward

        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._scaled:
                self._note_loss(tensors)
            self._scaled = False
            return original(tensors, *args, **kwargs)

        module.backward = backward

    def _note_loss(self, loss: Any) -> None:
        if getattr(loss, "shape", None) == ():
            held = loss.detach().float()
            self._loss = held if self._loss is None else self._loss + held

    def _record_scaler(self, module: Any) -> None:
        original = module.LossScaler.scale

        @functools.wraps(original)
        def scale(scaler: Any, loss: Any) -> Any:
            self._note_loss(loss)
            self._scaled = True
            return original(scaler, loss)

        module.LossScaler.scale = scale

    def _record_loader(self, module: Any) -> None:
        kind = module._BaseDataLoaderIter
        kind.__next__ = self._timed(kind.__next__)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self._waited += time.perf_counter() - began

        return timed

    def _record_keras(self, module: Any) -> None:
        original = module.Model.fit

        @functools.wraps(original)
        def fit(model: Any, *args: Any, callbacks: Any = None, **kwargs: Any) -> Any:
            keras = importlib.import_module("keras")
            seen = 0

            def made() -> int:
                return int(keras.ops.convert_to_numpy(model.optimizer.iterations))

            def begin(logs: Any) -> None:
                nonlocal seen
                seen = made()

            def note(batch: int, logs: Any) -> None:  # a batch is a part of an update, or several
                nonlocal seen
                count, seen = made() - seen, made()
                if count:
                    self.update((logs or {}).get("loss"), count)

            held = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
            own = [each for each in held if each is not None]
            added = keras.callbacks.LambdaCallback(on_train_begin=begin, on_train_batch_end=note)
            return original(model, *args, callbacks=[*own, added], **kwargs)

        module.Model.fit = fit

    def _record_profiles(self, module: Any) -> None:
        original = module.choose_recipe

        @functools.wraps(original)
        def choose(profile: Any, *args: Any, **kwargs: Any) -> Any:
            chosen = original(profile, *args, **kwargs)
            if chosen.applies:
                self.profiles.append(str(profile) if isinstance(profile, str | Path) else "")
            return chosen

        module.choose_recipe = choose


def _wait_for_device() -> None:
    cuda = sys.modules.get("torch.cuda")
    if cuda is not None and cuda.is_available() and cuda.is_initialized():
        cuda.synchronize()


def main() -> None:
    """Run the script that the argument names."""
    if importlib.util.find_spec("autoprec") is None:
        sys.path.append(str(Path(__file__).parents[2]))
    from autoprec.core.codec import from_plain
    from autoprec.errors import UserCodeError
    from autoprec.workers.parked_script import run_as_main
    from autoprec.workers.task_source import TaskSource

    settings = json.loads(sys.argv[1])
    recorder = _Recorder(settings["updates"], Path(settings["write_to"]))
    recorder.install()
    try:
        run_as_main(from_plain(TaskSource, settings["source"]))
    except UserCodeError as error:
        sys.exit(f"{error.frames}{error}")
    recorder.write(ended=True)


if __name__ == "__main__":
    main()
