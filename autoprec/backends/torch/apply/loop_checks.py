"""Says, once and early, where a training loop does not do what its profile needs of it.

`apply_profile` alone changes no loop: one that never calls `precision.forward` or `autocast` trains
in float32 for ever, one that never calls `precision.backward` makes an update of every micro-batch,
and an autocast or a GradScaler of one's own takes the place of the profile's. None of it raises. So
the first steps of the optimizers are noticed; then a warning says what was seen and which lines to
write, and nothing of it is left. Where a recipe asks nothing of a loop, nothing is said.

The same steps show a `zero_grad()` of the loop's own. It is harmless until a profile accumulates,
where it is an error: so it is said under every profile. And they show modules that were put into
the model after the profile was applied, in place of those that it keeps in float32.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autoprec.backends.torch.apply.calling_frames import local_variables
from autoprec.backends.torch.apply.first_update import computes_products
from autoprec.backends.torch.apply.float32_islands import (
    NEVER_CALLED,
    Float32Island,
    Float32Outputs,
)
from autoprec.backends.torch.apply.forward_wrappers import is_compiled, wrappers_on
from autoprec.backends.torch.apply.loss_scaler import LossScaler
from autoprec.backends.torch.apply.model_changes import unwrap
from autoprec.backends.torch.apply.noticed_steps import ignore_steps, notice_steps, warn_of_loop
from autoprec.backends.torch.apply.seen_calls import (
    CALLS,
    SeenForwards,
    SeenUpdates,
    SeenZeroGrad,
)
from autoprec.backends.torch.dtypes import (
    EXACT_DTYPES,
    LOW_DTYPES,
    autocast_dtype,
    dtype_name,
)
from autoprec.core.recipe import Recipe

STEPS = 3
"""Steps of one optimizer that are noticed."""

_FORWARD = "In the loop, write\n    loss = loss_fn(precision.forward(inputs), targets)\n"
_LINES = (
    f"{_FORWARD}    precision.backward_and_step(loss)\n"
    "in place of model(inputs), loss.backward(), optimizer.step() and zero_grad()"
)
_OWN_SCALED = (
    ". A loss scale needs a torch.optim.Optimizer that unscales and skips: derive yours from it, "
    "give it to apply_profile and call precision.backward_and_step(loss), or take mixed_bfloat16"
)


class LoopCheck:
    """Notices the first steps of a model's optimizers; holds neither the model nor them.

    Those are the ones it is given, and all others that have parameters of the model. Where none is
    given, nothing is attached to the model before one steps: it may never be trained.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: LossScaler,
        device_type: str,
    ) -> None:
        self._recipe = recipe
        self._scaler = weakref.ref(scaler)  # it leads to the model's state, and so to the model
        self._scales = scaler.is_enabled()
        self._dtype = autocast_dtype(recipe.policy)
        self._cast = self._backward = False
        self._zero_grads: set[bool] = set()
        self._foreign_scaler = self._past_scaler = False
        self._steps: dict[int, int] = {}
        self._seen, self._layers = SeenForwards(device_type), SeenForwards(device_type)
        self._updates = SeenUpdates()
        self._handles: list[Any] = []
        self._owners: list[weakref.ref[Any]] = []
        self._model = weakref.ref(model)
        self._given = bool(optimizers)
        self._dtypes = _dtypes_of(unwrap(model))
        self._concerned: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool]
        self._concerned = weakref.WeakKeyDictionary(dict.fromkeys(optimizers, True))
        self.is_over = False
        if self._given:
            self._begin(model, optimizers)
        _tell_of_calls(unwrap(model), self)
        notice_steps(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave nothing of it in a copy of the model."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def _begin(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Attach what notes the model's calls, and the clearing of gradients that ours clears."""
        root = unwrap(model)
        in_view = root is model or isinstance(model, nn.parallel.DistributedDataParallel)
        if in_view and not is_compiled(root):  # a hook would be compiled, too
            self._handles.append(root.register_forward_pre_hook(self._seen))
            layers = _layers(root) if self._dtype is not None else ()
            self._handles += [each.register_forward_pre_hook(self._layers) for each in layers]
        owners = (model, root, *optimizers) if self._given else ()
        for owner in {id(each): each for each in owners}.values():
            if "zero_grad" not in vars(owner):
                vars(owner)["zero_grad"] = SeenZeroGrad(owner, self.note_zero_grad)
                self._owners.append(weakref.ref(owner))

    def note_cast(self) -> None:
        """Note that the precision's autocast was used where gradients are computed."""
        self._cast = self._cast or torch.is_grad_enabled()

    def note_call(self, root: nn.Module) -> None:
        """Note a call of the model; say what is wrong where its weights change without a step.

        So it is where people's own classes or functional updates train it. Steps of torch's
        optimizers tell more, where there are any.
        """
        if self._steps or (self._cast and not self._scales):
            _tell_of_calls(root, None)
        elif torch.is_grad_enabled():
            if not self._given:
                self._seen(root, ())
            if self._updates.are_seen_by(root):
                self._say_of_own_updates(root)

    def _say_of_own_updates(self, root: nn.Module) -> None:
        found = self._faults_of_the_forward_pass()
        scaler = self._scaler()
        if self._scales and scaler is not None and not scaler.has_unscaled:
            in_use = self._backward or scaler.is_in_use
            found.append(
                "gradients stay multiplied by the loss scale, and an overflow is not skipped"
                if in_use
                else "the loss is not scaled, which float16 needs"
            )
        self.end()
        if found:
            warn_of_loop(
                f"after {CALLS} calls of the model under this profile, whose weights change though "
                f"no torch.optim.Optimizer steps: {'; '.join(found)}. {_FORWARD}"
                f"in place of model(inputs){_OWN_SCALED if self._scales else ''}"
            )

    def note_backward(self) -> None:
        """Note that `precision.backward` was called."""
        self._backward = True

    def note_zero_grad(self, owner: Any) -> None:
        """Note a `zero_grad()` of the loop's own, and whether it had anything to clear."""
        if self._backward:
            self._zero_grads.add(_has_gradients(owner))

    def end(self) -> None:
        """Leave everything as it was."""
        self.is_over = True
        model = self._model()
        if model is not None:
            _tell_of_calls(unwrap(model), None)
        ignore_steps(self)
        for handle in self._handles:
            handle.remove()
        for each in self._owners:
            owner = each()
            if owner is not None and isinstance(vars(owner).get("zero_grad"), SeenZeroGrad):
                del vars(owner)["zero_grad"]

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step of any optimizer; after the last of the first ones, say what was seen."""
        model = self._model()
        if model is None or not self._concerns(optimizer, model):
            return
        if not (self._given or self._steps):
            self._steps[id(optimizer)] = 0
            self._seen = SeenForwards(self._seen.device_type)
            self._begin(model, ())
            return
        self._foreign_scaler |= self._steps_by_another_scaler()
        scaler = self._scaler()
        self._past_scaler |= self._scales and scaler is not None and not scaler.is_stepping
        steps = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if steps < STEPS or self.is_over:
            return
        self.end()
        found = [*self._faults_of_the_forward_pass(), *self._faults_of_the_update(steps)]
        if found:
            lines = _LINES if self._given else f"{_LINES}, and give apply_profile the optimizer"
            warn_of_loop(
                f"after {STEPS} optimizer steps under this profile: {'; '.join(found)}. {lines}"
            )
        for fault in self._faults_of_the_model(unwrap(model)):
            warn_of_loop(fault)
        # What one network's loss leaves in another is the loop's to clear. With accumulation a
        # zero_grad() is an error.
        if self._zero_grads == {False} and self._recipe.accumulation_steps == 1:
            warn_of_loop(
                "zero_grad() is called in a loop of precision.backward() and precision.step(), "
                "which clears the gradients itself: delete it. Under this profile it does nothing, "
                "under one that accumulates it discards micro-batches, and is an error"
            )

    def _concerns(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
        if optimizer not in self._concerned:
            own = {id(parameter) for parameter in unwrap(model).parameters()}
            groups = optimizer.param_groups
            self._concerned[optimizer] = any(id(p) in own for g in groups for p in g["params"])
        return self._concerned[optimizer]

    def _steps_by_another_scaler(self) -> bool:
        """Return whether an enabled GradScaler that is not the profile's is calling this step."""
        frame: types.FrameType | None = sys._getframe(3)
        for _ in range(8):
            if frame is None:
                return False
            caller = local_variables(frame).get("self")
            if isinstance(caller, torch.amp.GradScaler) and caller is not self._scaler():
                return caller.is_enabled()
            frame = frame.f_back
        return False

    def _faults_of_the_forward_pass(self) -> list[str]:
        others = {dtype_name(each) for each in self._seen.dtypes - {None, self._dtype}}
        policy = self._recipe.policy
        if others:
            return [
                f"the model runs under an autocast in {' and '.join(sorted(others))} that is not "
                f"the profile's, which is {policy}: use precision.forward(inputs), or "
                "precision.autocast() in place of torch.autocast"
            ]
        seen = self._seen.dtypes | self._layers.dtypes
        if self._dtype is None or self._dtype in seen or (self._cast and not seen):
            return []
        return [
            f"the model runs in float32 and not in {policy}: neither precision.forward(inputs) nor "
            "precision.autocast() was seen around it"
        ]

    def _faults_of_the_model(self, root: nn.Module) -> Iterator[str]:
        """Say what was done to the model since, and what its parameters' hooks get to see."""
        policy = self._recipe.policy
        cast = (_dtypes_of(root) - self._dtypes) & {*LOW_DTYPES, *EXACT_DTYPES}
        if cast:
            yield (
                f"the weights became {' and '.join(sorted(map(dtype_name, cast)))} after "
                f"apply_profile: {policy} keeps them in float32 and chooses what to compute in. "
                "Leave out model.to(dtype) and the like"
            )
        if self._dtype is None:
            return
        outside, inside = self._seen.dtypes, self._layers.dtypes
        if self._dtype in outside and inside and self._dtype not in inside:
            yield (
                "the model's own code switches the profile's autocast off, or opens another one, "
                f"around all of its layers: none runs as {policy} says. Take that out of its "
                "forward"
            )
        again = "call apply_profile again, once the model is complete and in place"
        replaced = _replaced(root, self._recipe)
        if replaced:
            yield (
                f"{' and '.join(replaced)} came into the model after apply_profile, which keeps "
                f"what was there in float32; it runs as {policy} says: {again}"
            )
        kinds = {parameter.device.type for parameter in root.parameters()}
        if kinds and self._seen.device_type not in kinds:
            yield (
                f"the model came to {' and '.join(sorted(kinds))} after apply_profile, which knew "
                f"it on {self._seen.device_type}, and runs in float32 and not in {policy}: {again}"
            )
        hooked = [name for name, p in root.named_parameters() if p._backward_hooks]
        if hooked and self._scales:
            yield (
                f"the hook on {hooked[0]} gets its gradient multiplied by the loss scale, so that "
                "clamping there, and all that is not linear, does something else than in float32: "
                "call precision.clip_grad_value_, or precision.scaler.unscale_(optimizer) first"
            )

    def _faults_of_the_update(self, steps: int) -> list[str]:
        found, recipe = [], self._recipe
        if self._foreign_scaler:
            own = (
                "whose scale and floor are the profile's"
                if self._scales
                else f"which is disabled, for {recipe.policy} needs no loss scale"
            )
            found.append(f"a GradScaler of your own scales the loss: use precision.scaler, {own}")
        scaler = self._scaler()
        if self._backward or (scaler is not None and scaler.is_in_use):
            if self._past_scaler and not self._foreign_scaler:
                found.append(
                    "optimizer.step() is called past the loss scale, so that gradients stay "
                    "multiplied by it and an overflow is not skipped: call precision.step"
                )
            return found
        if self._scales and not self._foreign_scaler:
            found.append("the loss is not scaled, which float16 needs: call precision.backward")
        wanted = recipe.accumulation_steps
        if wanted > 1 and self._seen.calls < wanted * steps:
            found.append(
                f"every micro-batch of {recipe.batch_size} makes an update, where the profile "
                f"accumulates {wanted}: call precision.backward and precision.step"
            )
        return found


def _replaced(root: nn.Module, recipe: Recipe) -> list[str]:
    """List the modules that the recipe keeps in float32 and that have lost it, and the model.

    A module that was put into another one, as checkpointing and sharding do, has kept it.
    """
    wanted: list[tuple[str, type]] = [("", Float32Outputs)]
    wanted += [(path, Float32Island) for path in recipe.float32_modules]
    found = []
    for path, kind in wanted:
        try:
            module = root.get_submodule(path)
        except AttributeError:  # nothing took its place
            continue
        wrappers = (each for inner in module.modules() for each in wrappers_on(inner))
        if not (isinstance(module, NEVER_CALLED) or any(isinstance(w, kind) for w in wrappers)):
            found.append(path or "the model's forward")
    return found


def _tell_of_calls(root: nn.Module, check: LoopCheck | None) -> None:
    for wrapper in wrappers_on(root):
        if isinstance(wrapper, Float32Outputs):
            wrapper.loop_check = check


def _layers(root: nn.Module) -> list[nn.Module]:
    """List what computes products, but not where some parts are kept in float32, or compiled."""
    found = [each for each in root.modules() if computes_products(each)]
    compiled = any(is_compiled(each) or "_orig_mod" in each._modules for each in root.modules())
    return [] if compiled or any(any(wrappers_on(each)) for each in found) else found


def _dtypes_of(model: nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for parameter in model.parameters()}


def _has_gradients(owner: Any) -> bool:
    if isinstance(owner, nn.Module):
        return any(p.grad is not None for p in owner.parameters())
    return any(p.grad is not None for group in owner.param_groups for p in group["params"])
