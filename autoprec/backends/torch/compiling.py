"""Keeps what is measured as compiled from running eagerly after all.

Dynamo compiles a function anew for every model and every shape that it meets, and after a few times
(`recompile_limit`) gives up and leaves it to Python, with no more than a log line. What is timed or
proven then is no longer what the recipe says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autoprec.core.recipe import Recipe


@contextmanager
def compiled_throughout(recipe: Recipe) -> Iterator[None]:
    """Make it an error where Dynamo gives up; afterwards forget what was compiled.

    Forgetting makes room: the next model of the same class counts as a recompilation otherwise.
    """
    if not recipe.compile:
        yield
        return
    import torch._dynamo

    torch.compiler.reset()
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            yield
    finally:
        torch.compiler.reset()
