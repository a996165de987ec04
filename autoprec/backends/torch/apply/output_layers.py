"""Where a model ends: the modules whose own code computes its last activation or its loss.

Found by reading, not by running: what a forward returns is followed through its source, from the
model into the child or the method that is called last, and into what a distribution or another
object is made from, until an activation is met, as a module or as a function call. What cannot be
read (generated code, a lambda, a result put together in a loop) is not found; the model's outputs
are cast up all the same.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.loss import _Loss

from autoprec.backends.torch.apply.forward_wrappers import class_forward

LAST_ACTIVATIONS = (
    nn.Softmax,
    nn.Softmax2d,
    nn.LogSoftmax,
    nn.Softmin,
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.AdaptiveLogSoftmaxWithLoss,
)

_OUTPUT_FUNCTIONS = {
    "softmax",
    "log_softmax",
    "softmin",
    "sigmoid",
    "logsigmoid",
    "log_sigmoid",
    "logsumexp",
    "cross_entropy",
    "nll_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
}


def find_output_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules whose own code ends the model, losses included.

    Last activations are those the model's result is followed to, and any among its direct
    children; activations deeper inside (attention, gates) are left alone.
    """
    found = [path for path, module in model.named_modules() if isinstance(module, _Loss)]
    found += [p for p, child in model.named_children() if isinstance(child, LAST_ACTIVATIONS)]
    found += _follow(model, "", frozenset())
    return tuple(dict.fromkeys(found))


def _follow(module: nn.Module, path: str, seen: frozenset[int]) -> Iterator[str]:
    """Yield the modules whose own code the result of `module` comes from last."""
    if id(module) in seen:
        return
    seen = seen | {id(module)}
    if isinstance(module, LAST_ACTIVATIONS):
        yield path
        return
    if class_forward(module) is nn.Sequential.forward:
        last = list(module.named_children())[-1:]
        for name, child in last:
            yield from _follow(child, _join(path, name), seen)
        return
    for value in _returned(module, "forward", frozenset()):
        if _is_activation(value):
            yield path
        elif name := _own_child(value):
            called = getattr(module, name, None)
            if isinstance(called, nn.Module):
                yield from _follow(called, _join(path, name), seen)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _returned(module: nn.Module, method: str, seen: frozenset[str]) -> Iterator[ast.expr]:
    """Yield the expressions a method returns, with names looked up and own methods followed."""
    unread = class_forward(module) is None or type(module).__module__.startswith("torch.nn.")
    if unread or method in seen:
        return
    try:
        source = textwrap.dedent(inspect.getsource(getattr(type(module), method)))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return
    assigned = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Return) or node.value is None:
            continue
        for value in _parts(node.value, assigned):
            name = _own_child(value)
            if name and inspect.isfunction(getattr(type(module), name, None)):
                yield from _returned(module, name, seen | {method})
            else:
                yield value


def _parts(value: ast.expr, assigned: dict[str, ast.expr]) -> Iterator[ast.expr]:
    """Yield the calls a returned expression consists of: through names, tuples and methods."""
    if isinstance(value, ast.Tuple | ast.List):
        for item in value.elts:
            yield from _parts(item, assigned)
    elif isinstance(value, ast.Dict):
        for item in value.values:
            yield from _parts(item, assigned)
    elif isinstance(value, ast.Name) and value.id in assigned:
        rest = {name: item for name, item in assigned.items() if name != value.id}
        yield from _parts(assigned[value.id], rest)
    elif isinstance(value, ast.Subscript):
        yield from _parts(value.value, assigned)
    elif isinstance(value, ast.Call):
        if _is_activation(value) or _own_child(value):
            yield value
        elif _makes_an_object(value):
            for item in (*value.args, *(each.value for each in value.keywords)):
                yield from _parts(item, assigned)
        elif isinstance(value.func, ast.Attribute):
            yield from _parts(value.func.value, assigned)  # softmax(x).squeeze(-1)


def _is_activation(value: ast.expr) -> bool:
    """Return whether this calls softmax or the like, as a function or as a tensor's method."""
    if not isinstance(value, ast.Call):
        return False
    name = value.func.attr if isinstance(value.func, ast.Attribute) else None
    name = value.func.id if isinstance(value.func, ast.Name) else name
    return name in _OUTPUT_FUNCTIONS and not _own_child(value)


def _makes_an_object(call: ast.Call) -> bool:
    """Return whether this calls a class, by its name: a distribution's, a dataclass's, dict."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    name = call.func.id if isinstance(call.func, ast.Name) else name
    return name[:1].isupper() or name in ("dict", "tuple", "list")


def _own_child(value: ast.expr) -> str:
    """Return `name` of a call `self.name(...)`, else ""."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return ""
    owner = value.func.value
    return value.func.attr if isinstance(owner, ast.Name) and owner.id == "self" else ""
