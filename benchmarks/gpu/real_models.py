"""The models of real size, and the ways in which each is trained to compare them.

A way is a recipe and what a recipe cannot say: whether float32 is IEEE's in convolutions, too,
where PyTorch begins with TF32; whether the step is written by hand instead of through
`apply_profile`; and whose model it is, where another one stands for a change of the model itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import (
    ATTENTION,
    BLOCKS,
    COMPILE_MODE,
    COMPILE_SCOPE,
    FLOAT8,
    GRAPH_MODES,
    Alignment,
    Recipe,
    untuned_loss_scale,
)

#: At this batch everything is measured; at `Model.batches` the ways that fit a short table.
Batches = tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """A task of benchmarks/gpu/real/, and what is special about measuring it.

    `float8` says that some of its linear layers are wide enough for it.
    `attention` says that its kernels of attention are compared, eager, and `stack` that compiling
    its equal blocks is compared with compiling all of it. Where `launches` bound its step, CUDA
    graphs are tried.
    `batches` are for a task without BATCH_SIZE: all ways at the last of them, some at the others.
    `rounded` is the task with a vocabulary of a round number; what padding brings is measured
    beside it, and nothing else.
    """

    task: str
    title: str
    convolutions: bool = False
    by_hand: bool = False
    float8: bool = False
    attention: bool = False
    stack: bool = False
    launches: bool = False
    batches: Batches = ()
    rounded: str = ""


@dataclass(frozen=True)
class Way:
    """One way to train a model. `name` tells it from the others and is a row's `way`."""

    name: str
    recipe: Recipe
    ieee: bool = False
    by_hand: bool = False
    task: str = ""

    def multiplies_in(self, model: Model) -> DType:
        """The dtype whose peak the way is held against: that of most of its products."""
        policy = self.recipe.policy
        if self.recipe.uses_float8:
            return DType.FLOAT8
        if policy is Policy.FLOAT32 and model.convolutions and not self.ieee:
            return DType.TF32
        return policy.compute_dtype


MODELS: Mapping[str, Model] = {
    "gpt2": Model("gpt2", "GPT-2 124M, 1024 tokens", by_hand=True, attention=True, stack=True),
    "resnet50": Model("resnet50", "ResNet-50, 224 px", convolutions=True, by_hand=True),
    "llama_blocks": Model("llama_blocks", "4 blocks of Llama 3 8B, 4096 tokens", float8=True),
    "bert_512": Model("bert_512", "BERT-base, masked words, 512 tokens"),
    "vit_b16": Model("vit_b16", "ViT-B/16, 224 px"),
    "unet": Model("unet", "U-Net, 64 channels, 256 px", convolutions=True),
    "imagenette": Model(
        "imagenette",
        "three strided convolutions, 256 px",
        convolutions=True,
        batches=(32, 64, 128, 256, 512),
    ),
    "bert_128": Model("bert_128", "BERT-base, masked words, 128 tokens"),
    "mlp8192": Model("mlp8192", "MLP 784-4096-4096-10", float8=True),
    "gpt2_rounded": Model("gpt2", "GPT-2 124M, vocabulary rounded", rounded="gpt2_rounded"),
    "mobilenet32": Model("mobilenet32", "MobileNetV2, 32 px", convolutions=True, launches=True),
}

#: What GPT-2's vocabulary of 50257 is padded to a multiple of: 50304, as `gpt2_rounded` has it.
ROUND = 64


def ways(model: Model, batch: int, has_tf32: bool) -> list[Way]:
    """All ways at one batch, plain float32 first; the compiled ones last, and side by side."""
    made = [] if model.rounded else list(_eager(model, batch))
    made += list(_vocabularies(model, batch)) if model.rounded else list(_compiled(model, batch))
    return [way for way in made if has_tf32 or way.recipe.policy is not Policy.TF32]


def few_ways(model: Model, batch: int) -> list[Way]:
    """The ways of an article's table: both kinds of float32, and 16 bits as it had and as best."""
    wanted = ("float32", "float32 IEEE", "mixed_float16", "mixed_bfloat16 channels_last")
    every = {way.name: way for way in _eager(model, batch)}
    return [replace(every[name], name=f"{name}, batch {batch}") for name in wanted]


def _recipe(policy: Policy, batch: int) -> Recipe:
    return Recipe(policy=policy, batch_size=batch, loss_scale=untuned_loss_scale(policy))


def _eager(model: Model, batch: int) -> Iterator[Way]:
    """As PyTorch runs it, by policy; convolutions in 16 bits in both layouts."""
    for policy in (Policy.FLOAT32, Policy.TF32, Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16):
        recipe = _recipe(policy, batch)
        yield Way(policy.value, recipe)
        if policy is Policy.FLOAT32:
            yield Way("float32 IEEE", recipe, ieee=True)
        if policy is Policy.MIXED_BFLOAT16 and model.by_hand:
            yield Way(f"{policy.value} by hand", recipe, by_hand=True)
        if policy is Policy.MIXED_BFLOAT16 and model.attention:
            for kernel in ("cudnn", "efficient"):
                yield Way(f"{policy.value} {kernel}", replace(recipe, knobs={ATTENTION: kernel}))
        if policy.mixed and model.convolutions:
            laid_out = replace(recipe, memory_format="channels_last")
            yield Way(f"{policy.value} channels_last", laid_out)


def _compiled(model: Model, batch: int) -> Iterator[Way]:
    """What is compiled: bfloat16, in the layout that suits convolutions, what refines it, TF32."""
    for policy in (Policy.MIXED_BFLOAT16, Policy.TF32):
        recipe = replace(_recipe(policy, batch), compile=True)
        if policy.mixed and model.convolutions:
            recipe = replace(recipe, memory_format="channels_last")
        yield Way(f"{policy.value} compiled", recipe)
        if policy.mixed and model.float8:
            yield Way("float8 compiled", replace(recipe, knobs={FLOAT8: True}))
        if policy.mixed and model.stack:
            by_block = replace(recipe, knobs={COMPILE_SCOPE: BLOCKS})
            yield Way(f"{policy.value} compiled by block", by_block)
        if policy.mixed and model.launches:
            graphs = replace(recipe, knobs={COMPILE_MODE: GRAPH_MODES[0]})
            yield Way(f"{policy.value} compiled, CUDA graphs", graphs)


def _vocabularies(model: Model, batch: int) -> Iterator[Way]:
    """The head as it is, padded while it runs, and rounded in the model; then compiled."""
    plain = _recipe(Policy.MIXED_BFLOAT16, batch)
    padded = replace(plain, alignment=Alignment(ROUND, ("head",)))
    yield Way("float32", _recipe(Policy.FLOAT32, batch))
    for compiled in (False, True):
        ending = " compiled" if compiled else ""
        for name, eager, task in (
            ("as it is", plain, ""),
            ("padded", padded, ""),
            ("rounded", plain, model.rounded),
        ):
            recipe = replace(eager, compile=compiled)
            yield Way(f"mixed_bfloat16 {name}{ending}", recipe, task=task)
