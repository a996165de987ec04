"""What a real trainer is, and cannot be together with a profile, is seen on it and refused.

test_refusals.py has the table's rows and messages; here are the objects that they are read from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils import TorchDynamoPlugin

from autoprec import Policy, Recipe
from autoprec.errors import UsageError
from autoprec.integrations.accelerate import bind
from autoprec.integrations.lightning import fabric_plugin, plugin
from autoprec.integrations.transformers import apply
from tests.integrations.lightning_modules import (
    PACKAGES,
    STRATEGIES,
    fabric_of,
    module_of,
    pytorch_of,
    strategy_here,
    trainer_of,
)
from tests.integrations.trained import loader, net
from tests.integrations.transformers_trainings import trainer_of as hf_trainer_of

pytestmark = [
    pytest.mark.release,
    pytest.mark.usefixtures("fresh_state", "without_tensorflow"),
    pytest.mark.filterwarnings("default"),
]

SPLIT = Recipe(batch_size=8, accumulation_steps=2)
WHOLE = Recipe(batch_size=8)
COMPILED = Recipe(batch_size=8, compile=True)
BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)
CHOOSING = Recipe(batch_size=8, knobs={"cudnn_benchmark": True})


@pytest.mark.parametrize(
    ("recipe", "arguments", "said"),
    [
        (SPLIT, {"auto_find_batch_size": True}, r"auto_find_batch_size .*leave that out"),
        (SPLIT, {"bf16_full_eval": True}, r"bf16_full_eval casts .*leave it out"),
        (SPLIT, {"fp16_full_eval": True}, r"fp16_full_eval casts .*leave it out"),
        (SPLIT, {"bf16": True}, r"told bf16 .*leave mixed_precision"),
        (SPLIT, {"torch_compile": True}, ""),
        (COMPILED, {"torch_compile": True}, r"torch_compile=True does as well\. take that out"),
        (CHOOSING, {"full_determinism": True}, r"full_determinism is asked for"),
        (SPLIT, {"full_determinism": True}, ""),
        (SPLIT, {"_n_gpu": 2}, r"DataParallel.*CUDA_VISIBLE_DEVICES=0"),
        (SPLIT, {"deepspeed": "settings.json"}, r"DeepSpeed casts .*export PROFILE"),
    ],
)
def test_the_trainers_arguments(
    recipe: Recipe, arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    trainer = hf_trainer_of(tmp_path, per_device_train_batch_size=recipe.batch_size)
    for name, value in arguments.items():  # made with them, some would change the process
        setattr(trainer.args, name, value)
    if not said:
        apply(trainer, recipe)
        return
    with pytest.raises(UsageError, match=f"^the Trainer with this profile: .*{said}"):
        apply(trainer, recipe)


def fsdp(version: int) -> Callable[[Accelerator], None]:
    def change(accelerator: Accelerator) -> None:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=version)

    return change


def kind(name: str) -> Callable[[Accelerator], None]:
    def change(accelerator: Accelerator) -> None:
        accelerator.state.distributed_type = DistributedType[name]

    return change


def deepspeed(accelerator: Accelerator) -> None:
    accelerator.state.distributed_type = DistributedType.DEEPSPEED
    settings = {"gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2}}
    plugin_of = DeepSpeedPlugin(hf_ds_config=settings)
    plugin_of._set_selected(True)
    accelerator.state.deepspeed_plugins = {"default": plugin_of}


def unchanged(accelerator: Accelerator) -> None:
    """Leave it as it was made."""


REGIONAL = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)


@pytest.mark.parametrize(
    ("recipe", "settings", "change", "said"),
    [
        (SPLIT, {"gradient_accumulation_steps": 4}, unchanged, r"accumulates 4 .*profile 2"),
        (WHOLE, {"mixed_precision": "bf16"}, unchanged, r"told bf16 .*float32"),
        (COMPILED, {"dynamo_backend": "inductor"}, unchanged, r"dynamo_backend does as well"),
        (WHOLE, {"dynamo_backend": "inductor"}, unchanged, ""),
        (WHOLE, {"dynamo_plugin": REGIONAL}, unchanged, r"regional .*use_regional_compilation off"),
        (WHOLE, {}, fsdp(1), r"FSDP1.*fsdp_version=2"),
        (SPLIT, {}, fsdp(2), r"FSDP2 keeps .*need not be split"),
        (WHOLE, {}, fsdp(2), ""),
        (WHOLE, {}, deepspeed, r"DeepSpeed casts .*--to deepspeed"),
        (WHOLE, {}, kind("MEGATRON_LM"), r"Megatron-LM has a precision of its own"),
        (WHOLE, {}, lambda a: a.prepare(net()), r"prepared its model already.*before prepare"),
    ],
)
def test_an_accelerators_state(
    recipe: Recipe, settings: dict[str, Any], change: Callable[[Accelerator], Any], said: str
) -> None:
    accelerator = Accelerator(cpu=True, **settings)
    change(accelerator)
    if not said:
        bind(accelerator, recipe)
        return
    with pytest.raises(UsageError, match=f"^accelerate with this profile: .*{said}"):
        bind(accelerator, recipe)


def test_a_model_on_several_devices() -> None:
    accelerator = Accelerator(cpu=True)
    bind(accelerator, WHOLE)
    model = net()
    model.hf_device_map = {"conv": 0, "head": 1}  # type: ignore[assignment]
    with pytest.raises(UsageError, match=r"several devices .*without device_map"):
        accelerator.prepare_model(model)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("recipe", "case", "said"),
    [
        (SPLIT, "accumulates", r"accumulates 4 .*profile 2"),
        (SPLIT, "GradientAccumulationScheduler", r"Scheduler changes .*profile accumulates 2"),
        (WHOLE, "GradientAccumulationScheduler", ""),
        (SPLIT, "manual", r"manual optimization .*use automatic optimization"),
        (WHOLE, "LBFGS", r"LBFGS calls .*AdamW or SGD"),
        (WHOLE, "BatchSizeFinder", r"BatchSizeFinder changes .*leave that out"),
        (COMPILED, "compiled", r"torch\.compile does as well"),
    ],
)
def test_a_lightning_project(package: str, recipe: Recipe, case: str, said: str) -> None:
    pl = pytorch_of(package)
    settings: dict[str, Any] = {"max_epochs": 1, "callbacks": []}
    lit = module_of(package, **({"optimizer": lbfgs} if case == "LBFGS" else {}))
    if case == "accumulates":
        settings["accumulate_grad_batches"] = 4
    if case == "GradientAccumulationScheduler":
        settings["callbacks"] = [pl.callbacks.GradientAccumulationScheduler({0: 1, 5: 4})]
    if case == "BatchSizeFinder":
        settings["callbacks"] = [pl.callbacks.BatchSizeFinder()]
        lit.batch_size, lit.train_dataloader = 8, lambda: loader(16, lit.batch_size)
    if case == "manual":
        lit.automatic_optimization = False
        settings["gradient_clip_val"] = None
    if case == "compiled":
        lit = torch.compile(lit)
    trainer = trainer_of(package, plugin(recipe, package=package), **settings)
    if not said:
        trainer.fit(lit, loader(16, 8))
        return
    loaders = [] if case == "BatchSizeFinder" else [loader(16, 8)]
    with pytest.raises(UsageError, match=f"^Lightning with this profile: .*{said}"):
        trainer.fit(lit, *loaders)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_lightning_strategy_with_a_precision_of_its_own(package: str, name: str) -> None:
    strategy = strategy_here(pytorch_of(package).strategies, name)
    made = plugin(WHOLE, package=package)
    with pytest.raises(UsageError, match=f"^Lightning with this profile: .*{STRATEGIES[name]}"):
        trainer_of(package, made, strategy=strategy)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("recipe", "said"), [(WHOLE, ""), (SPLIT, r"FSDP2 .*need not be split")])
def test_lightnings_fsdp2(package: str, recipe: Recipe, said: str) -> None:
    """It needs two ranks to train: test_two_ranks_torch.py."""
    strategies = pytorch_of(package).strategies
    settings = {"root_device": torch.device("cpu")}
    strategy = type("OurModelParallelStrategy", (strategies.ModelParallelStrategy,), settings)()
    trainer = SimpleNamespace(strategy=strategy, accumulate_grad_batches=1, callbacks=[])
    module = SimpleNamespace(trainer=trainer, automatic_optimization=True)
    made = plugin(recipe, package=package)
    if not said:
        assert made.convert_module(module) is module
        return
    with pytest.raises(UsageError, match=f"^Lightning with this profile: .*{said}"):
        made.convert_module(module)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_strategy_that_is_given_the_plugin_as_its_own_is_refused(package: str) -> None:
    strategies, made = pytorch_of(package).strategies, plugin(WHOLE, package=package)
    with pytest.raises(UsageError, match=r"^Lightning with .*FSDP1.*ModelParallelStrategy"):
        strategies.FSDPStrategy(precision_plugin=made)
    strategies, made = fabric_of(package).strategies, fabric_plugin(WHOLE, package=package)
    with pytest.raises(UsageError, match=r"^Fabric with .*FSDP1.*ModelParallelStrategy"):
        strategies.FSDPStrategy(precision=made)
    assert f"{made}" == str(made)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_module_that_is_never_called_itself_is_not_compiled(package: str) -> None:
    lit = module_of(package)
    lit.head = torch.nn.Linear(3, 3)  # which of both parts was tuned no path of the recipe says
    trainer = trainer_of(package, plugin(COMPILED, package=package), max_epochs=1)
    with pytest.raises(UsageError, match=r"Lit is never called itself\. .* part='model'"):
        trainer.fit(lit, loader(16, 8))
