"""Every error autoprec raises on purpose, in one tree.

    AutoprecError                    exit code 1
    ├── UsageError                   2  a wrong argument, option or file
    │   ├── ProfileError             2  a profile file that cannot be read as one
    │   ├── CatalogueError           2  a device file that cannot be read as one
    │   ├── FrameworkMissing         2  a framework that is named but not installed
    │   └── DeviceUnusable           2  a device that the task's framework cannot drive here
    ├── TaskError                    1  the task file is wrong
    │   └── UserCodeError            1  the user's own code raised; carries the user's frames
    │       └── DataError            1  build_data, or what it returned, raised
    ├── TrialFailure                 1  a worker failed in a way that ends the run
    ├── NoFeasibleRecipe             3  nothing that was asked for passes
    ├── ProfileMismatch              4  the profile does not fit this device
    ├── DeviceBusy                   1  another tuning holds the device
    └── Interrupted                130  stopped by the user; what was learned is kept

Commands that ended well exit with 5 (`UNRESOLVED`) if --strict asks for it and nothing could be
concluded, and `verify` if a claim fails.

A message says what was given, what was expected, and how to fix it. Nothing here imports anything.
"""

from __future__ import annotations

UNRESOLVED = 5
"""The exit code where measurements contradict each other, or a profile's claim."""


class AutoprecError(Exception):
    """Base of every error autoprec raises on purpose."""

    exit_code = 1


class UsageError(AutoprecError):
    """An argument, an option or an input file is wrong."""

    exit_code = 2


class ProfileError(UsageError):
    """A profile file cannot be read as a profile."""


class CatalogueError(UsageError):
    """A device file cannot be read as a list of families."""


class FrameworkMissing(UsageError):
    """A framework was named that is not installed here."""


class DeviceUnusable(UsageError):
    """The task's framework, as it is installed here, cannot drive the device."""


class TaskError(AutoprecError):
    """The task file cannot be used as it is."""


class UserCodeError(TaskError):
    """The user's own code raised; `frames` is their traceback without ours."""

    def __init__(self, message: str, frames: str = "") -> None:
        super().__init__(message)
        self.frames = frames


class DataError(UserCodeError):
    """The user's data could not be built or gone through, whatever was trained on them."""


class TrialFailure(AutoprecError):
    """A worker failed in a way that the tuning cannot go on from."""


class NoFeasibleRecipe(AutoprecError):
    """None of the policies asked for passes on this device."""

    exit_code = 3


class ProfileMismatch(AutoprecError):
    """A profile was made for another device or framework."""

    exit_code = 4


class DeviceBusy(AutoprecError):
    """Another tuning is measuring on the same device."""


class Interrupted(AutoprecError):
    """The user stopped the run; everything learned so far is kept."""

    exit_code = 130


class AutoprecWarning(UserWarning):
    """The result is still right but worse than it could be; the message says why and what to do."""


def first_line(error: Exception) -> str:
    """Return the first line of what an exception says, or its type.

    Keras says first in which layer's call it was raised, then what, in bold; TorchScript says what
    in the end.
    """
    text = str(error).replace("\x1b[1m", "").replace("\x1b[0m", "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("Exception encountered when calling "):
        return lines[1][:200]
    if len(lines) > 1 and lines[0].endswith("failed in the TorchScript interpreter."):
        return lines[-1].removeprefix("RuntimeError: ")[:200]
    return lines[0][:200] if lines else type(error).__name__
