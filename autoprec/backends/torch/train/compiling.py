"""Makes sure that what is measured as compiled does not run eagerly.

Dynamo recompiles a function for every new model and shape, and after a few times
(`recompile_limit`) gives up and runs it eagerly, with no more than a log line. What is timed or
proven then is not what the recipe says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from autoprec.core.recipe import Recipe


class NotCompiled(RuntimeError):
    """A recipe says that the step is compiled, and nothing of it is."""


@contextmanager
def compiled_throughout(recipe: Recipe) -> Iterator[None]:
    """Make it an error where Dynamo gives up; afterwards forget what was compiled.

    The count of compiled graphs starts at 0, for `check_compiled`. Without forgetting, the next
    model of the same class would count as a recompilation.
    """
    if not recipe.compile:
        yield
        return
    import torch._dynamo

    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            yield
    finally:
        torch.compiler.reset()


def check_compiled(recipe: Recipe) -> None:
    """Raise `NotCompiled` where Dynamo compiled nothing of a step that a compiled recipe ran."""
    if not recipe.compile:
        return
    import torch._dynamo

    if not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        raise NotCompiled(
            "torch.compile compiled nothing of this model: Dynamo is switched off, in the "
            "environment (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE) or for the model's own code "
            "(torch.compiler.disable)"
        )
