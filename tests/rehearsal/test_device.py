"""The pretended accelerators themselves: what a rehearsal relies on."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest

from rehearsal import GIB, T4, Gpu

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.release]

# What every kind must do: place, refuse, cast and train as the real one does.
TRAINS = """
import json, sys
import torch
from torch import nn
from torch.nn import functional as F
from autoprec.backends.torch.apply.loss_scaler import LossScaler
from autoprec.core.recipe import LossScale

device, found = sys.argv[1], {}

def message(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""

x, y = torch.randn(8, 16), torch.randint(4, (8,))
for dtype in (torch.float16, torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = LossScaler(device, LossScale(initial=256.0) if dtype is torch.float16 else None)
    losses = []
    for _ in range(3):
        with torch.autocast(device, dtype):
            outputs = model(x.to(device))
        assert outputs.dtype is dtype and outputs.device.type == device
        loss = F.cross_entropy(outputs.float(), y.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    found[str(dtype)] = losses
    with torch.autocast(device, dtype):
        found["exp"] = str(torch.exp(torch.ones(2, device=device, dtype=dtype)).dtype)
        found["bce"] = message(lambda: F.binary_cross_entropy(
            torch.rand(2, device=device), torch.rand(2, device=device)))
found["mixed"] = message(lambda: torch.ones(2, device=device) + torch.ones(2))
found["float64"] = message(lambda: torch.ones(2, device=device).double())
found["made"] = message(lambda: torch.ones(2, dtype=torch.float64, device=device))
found["numpy"] = message(lambda: torch.ones(2, device=device).numpy())
found["recommended"] = torch.mps.recommended_max_memory() if device == "mps" else 0
"""

# Their generators are put back, too.
RANDOM = """
from autoprec.backends.shared.rng_streams import RandomStream
from autoprec.backends.torch.train.rng import TorchGenerators, rng_preserved, seed_everything

module = getattr(torch, device)
torch.ones(1, device=device)
seed_everything(1)
one = module.get_rng_state()
seed_everything(2)
two, stream = module.get_rng_state(), RandomStream(TorchGenerators())
assert not torch.equal(one, two)
with rng_preserved():
    seed_everything(1)
    assert torch.equal(module.get_rng_state(), one)
assert torch.equal(module.get_rng_state(), two)
seed_everything(1)
with stream.swapped():
    assert torch.equal(module.get_rng_state(), two)
assert torch.equal(module.get_rng_state(), one)
"""
SAID = "print(json.dumps(found))"
CALLED = {"cuda": "cuda", "rocm": "cuda", "xpu": "xpu", "mps": "mps"}


@pytest.mark.parametrize("kind", CALLED)
def test_it_trains_and_refuses_what_the_real_one_refuses(rehearse: Any, kind: str) -> None:
    found = json.loads(rehearse(kind).python(TRAINS + RANDOM + SAID, CALLED[kind]))
    for dtype in ("torch.float16", "torch.bfloat16"):
        assert found[dtype] == sorted(found[dtype], reverse=True)
    assert found["exp"] == "torch.float32"
    assert "at least two devices" in found["mixed"]
    assert "Tensor.cpu()" in found["numpy"]
    assert ("unsafe to autocast" in found["bce"]) == (kind != "mps")
    refusal = {"mps": "MPS framework doesn't support float64", "xpu": "aspect fp64"}.get(kind, "")
    for name in ("float64", "made"):
        assert refusal in found[name]
        assert bool(refusal) == bool(found[name])
    assert found["recommended"] == (4 * GIB if kind == "mps" else 0)


def test_a_data_centre_xpu_has_float64(rehearse: Any) -> None:
    found = json.loads(rehearse("xpu", float64=True).python(TRAINS + SAID, "xpu"))
    assert found["float64"] == found["made"] == ""


MODELS = """
import torch
from torch import nn
from torch.nn.utils import rnn

class First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, *inputs):
        outputs = self.inner(*inputs)
        return outputs[0] if isinstance(outputs, tuple) else outputs

class Packed(nn.Module):
    # Lengths are on the CPU, as the real one wants them.
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 7, batch_first=True)

    def forward(self, inputs):
        packed = rnn.pack_padded_sequence(
            inputs, torch.tensor([4, 1, 2]), batch_first=True, enforce_sorted=False)
        assert packed.batch_sizes.device.type == "cpu"
        return rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]

cases = {
    "lstm": (First(nn.LSTM(5, 7, 2)), torch.randn(4, 3, 5)),
    "packed": (Packed(), torch.randn(3, 4, 5)),
    "gru": (First(nn.GRU(5, 7, batch_first=True, bidirectional=True)), torch.randn(3, 4, 5)),
    "conv": (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2)),
             torch.randn(2, 3, 8, 8)),
    "encoder": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
                torch.randn(2, 5, 8)),
    "embedding": (nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4)), torch.randint(9, (2, 3))),
    "channels_last": (nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
                      torch.randn(2, 4, 6, 6).contiguous(memory_format=torch.channels_last)),
}
for name, (model, inputs) in cases.items():
    results = []
    for device in ("cpu", "cuda"):
        model = model.to(device)
        outputs = model(inputs.to(device))
        model.zero_grad()
        outputs.square().sum().backward()
        found = [outputs.detach(), *(p.grad for p in model.parameters())]
        results.append([each.cpu().clone() for each in found])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")

for made in (torch.tensor([1.5, 2.0], device="cuda"), torch.as_tensor([1.5, 2.0], device="cuda:0"),
             torch.ones(1, device="cuda").new_tensor([1.5, 2.0])):
    assert made.device.type == "cuda" and made.tolist() == [1.5, 2.0]

guesses = torch.randn(6, 2, 5).log_softmax(-1).requires_grad_()
labels, lengths = torch.randint(1, 5, (2, 3)), (torch.tensor([6, 5]), torch.tensor([3, 2]))
there = guesses.detach().to("cuda").requires_grad_()
for scores, classes in ((guesses, labels), (there, labels.to("cuda"))):
    nn.functional.ctc_loss(scores, classes, *lengths).backward()
torch.testing.assert_close(there.grad.cpu().clone(), guesses.grad)

lengths = torch.tensor([4, 1, 2], device="cuda")
try:
    rnn.pack_padded_sequence(torch.randn(3, 4, 5, device="cuda"), lengths, True, False)
except RuntimeError as error:
    assert "should be a 1D CPU int64 tensor" in str(error), error
else:
    raise AssertionError("lengths on the device are packed")
leaf = torch.tensor([1.0, 2.0], device="cuda", requires_grad=True)
leaf.square().sum().backward()
assert leaf.grad.device.type == "cuda" and leaf.grad.tolist() == [2.0, 4.0]

import copy, io
model = cases["conv"][0]
twin = copy.deepcopy(model)
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
with torch.no_grad():
    next(twin.parameters()).add_(1)
assert not torch.equal(next(model.parameters()), next(twin.parameters()))
file = io.BytesIO()
torch.save({k: v.cpu() for k, v in model.state_dict().items()}, file)
file.seek(0)
twin.load_state_dict(torch.load(file))
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))
for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
    for fused in (False, True):
        own = [torch.nn.Parameter(torch.ones(3, device="cuda"))]
        stepping = optimizer(own, lr=0.1, fused=fused)
        own[0].sum().backward()
        stepping.step()
        assert own[0].device.type == "cuda" and not torch.equal(own[0].cpu(), torch.ones(3))
"""


MEMORY = """
import gc, subprocess, sys
import torch

cuda, mib = torch.cuda, 2**20
free, total = cuda.mem_get_info()
assert (total, free) == (256 * mib, 192 * mib)     # a stranger holds 64 MiB
kept = torch.ones(16 * mib // 4, device="cuda")
view = kept[::2]
assert cuda.memory_allocated() == 16 * mib         # a view takes nothing
del kept
assert cuda.memory_allocated() == 16 * mib         # and keeps its storage
del view
gc.collect()
assert cuda.memory_allocated() == 0
assert cuda.memory_reserved() == 16 * mib == total - 64 * mib - cuda.mem_get_info()[0]
assert cuda.max_memory_allocated() == 16 * mib
cuda.empty_cache()
assert cuda.mem_get_info()[0] == 192 * mib
cuda.reset_peak_memory_stats()
assert cuda.max_memory_reserved() == 0
try:
    torch.ones(200 * mib // 4, device="cuda")
except torch.OutOfMemoryError as error:
    assert "CUDA out of memory. Tried to allocate 200.00 MiB" in str(error)
else:
    raise AssertionError("no limit")
assert cuda.memory_allocated() == 0
try:
    cuda.set_per_process_memory_fraction(0.5, torch.device("cuda"))
except ValueError as error:
    assert "index" in str(error), error
else:
    raise AssertionError("torch's own check of arguments is gone")
cuda.set_per_process_memory_fraction(0.25, torch.device("cuda:0"))
try:
    torch.ones(100 * mib // 4, device="cuda")
except torch.OutOfMemoryError:
    pass
else:
    raise AssertionError("the fraction does not count")
held = torch.ones(32 * mib // 4, device="cuda")
other = "import torch; print(torch.cuda.mem_get_info()[0])"
seen = int(subprocess.run([sys.executable, "-c", other], capture_output=True, check=True).stdout)
assert seen == (192 - 32) * mib, seen
"""


def test_memory_is_counted_cached_limited_and_shared(rehearse: Any) -> None:
    rehearse("cuda", gpus=[Gpu("NVIDIA L4", "8.9", gib=0.25, others_gib=0.0625)]).python(MEMORY)


COPIES = """
import torch

on_gpu = torch.arange(4.0, device="cuda")
early = on_gpu.to("cpu", non_blocking=True)
assert early.isnan().all()
torch.cuda.synchronize()
assert early.tolist() == [0, 1, 2, 3]
into = torch.zeros(4)
into.copy_(on_gpu, non_blocking=True)
assert into.isnan().all()
on_gpu.sum().item()
assert into.tolist() == [0, 1, 2, 3]
assert on_gpu.cpu().tolist() == [0, 1, 2, 3]
assert torch.ones(2).to("cuda", non_blocking=True).cpu().tolist() == [1, 1]
"""


def test_it_computes_what_the_cpu_computes_and_copies_end_when_waited_for(rehearse: Any) -> None:
    rehearse("cuda").python(MODELS + COPIES)


FAULTS = """
import torch

half = torch.ones(2, 2, device="cuda", dtype=torch.float16)
full = torch.ones(2, 2, device="cuda")
full @ full
try:
    half @ half
except RuntimeError as error:
    assert "CUBLAS_STATUS_NOT_INITIALIZED" in str(error)
else:
    raise AssertionError("no fault")
full @ full
torch.sigmoid(full)
try:
    torch.sigmoid(full)
except RuntimeError as error:
    assert "illegal memory access" in str(error)
try:
    full + 1
except RuntimeError as error:
    assert "illegal memory access" in str(error)   # the context is lost
else:
    raise AssertionError("the context survived")
"""


def test_faults_come_where_they_were_ordered_and_some_lose_the_context(rehearse: Any) -> None:
    faults = [
        {"op": "mm", "dtype": "float16", "error": "cublas"},
        {"op": "sigmoid", "nth": 2, "error": "illegal"},
    ]
    rehearse("cuda", faults=faults).python(FAULTS)


def test_a_fault_may_hit_the_first_process_only(rehearse: Any) -> None:
    machine = rehearse("cuda", faults=[{"op": "sigmoid", "error": "launch", "once": True}])
    code = "import torch; torch.sigmoid(torch.ones(1, device='cuda'))"
    with pytest.raises(AssertionError, match="unspecified launch failure"):
        machine.python(code)
    machine.python(code)


GPUS = """
import json, torch
count = torch.cuda.device_count()
print(json.dumps([torch.cuda.get_device_properties(i).name for i in range(count)]))
if count > 1:
    second = torch.ones(2, device="cuda:1")
    with torch.cuda.device(1):
        assert torch.ones(2, device="cuda").device.index == 1
    try:
        second + torch.ones(2, device="cuda:0")
    except RuntimeError as error:
        assert "cuda:1 and cuda:0" in str(error)
    else:
        raise AssertionError("two GPUs met")
"""


def test_several_gpus_are_shown_as_the_variable_says(rehearse: Any) -> None:
    gpus = [Gpu("NVIDIA A100-SXM4-40GB", "8.0"), T4, Gpu("NVIDIA H100 PCIe", hidden=True)]

    def seen(**environment: str) -> list[str]:
        return json.loads(rehearse("cuda", gpus=gpus, environment=environment).python(GPUS))

    assert seen() == ["NVIDIA A100-SXM4-40GB", "Tesla T4"]
    assert seen(CUDA_VISIBLE_DEVICES="1,0") == ["Tesla T4", "NVIDIA A100-SXM4-40GB"]
    assert seen(CUDA_VISIBLE_DEVICES="GPU-00000002") == ["Tesla T4"]


PLACED = """
import json, sys
from autoprec.api import probe
from autoprec.backends.shared import matmul_timing as products
from autoprec.core.device.merging import with_measurements

products._command = lambda framework, device, dtypes: [sys.executable, "-c", (
    "import json, torch; from autoprec.backends.torch.devices import resolve_device; "
    "device = torch.device('%s'); resolve_device(device); found = torch.get_device_module(device); "
    "name = found.get_device_name(torch.empty(1, device=device).device); "
    "print(json.dumps({'error': f'{found.device_count()} {name}'}))" % device)]
facts = [report.facts for report in probe().devices[:-1]]
measured = [with_measurements(each, products.measure(each, ["torch"])) for each in facts]
print(json.dumps([[each.address, each.name, each.notes[-1]] for each in measured]))
"""
FASTER = Gpu("a faster GPU", capability="9.4")


@pytest.mark.parametrize("kind", ["cuda", "rocm", "xpu"])
def test_products_are_timed_on_the_gpu_that_the_probe_means(rehearse: Any, kind: str) -> None:
    """The slower is first on the bus, and the faster first in CUDA's own order and Level Zero's.

    No variable hides Intel's others from a child: it is put on the one that is meant.
    """
    machine = rehearse(kind, gpus=[replace(T4, name="a slower GPU"), FASTER])
    measured = json.loads(machine.python(PLACED))
    assert [address for address, *_ in measured] == [f"{kind}:0", f"{kind}:1"]
    order = ["a slower GPU", "a faster GPU"]
    if kind == "cuda":
        order.reverse()
    shown = 2 if kind == "xpu" else 1
    assert [note for *_, note in measured] == [f"not measured: {shown} {name}" for name in order]
    if kind != "xpu":  # whose probe knows no names
        assert [name for _, name, _ in measured] == order


def test_products_are_timed_on_it_without_a_failure(rehearse: Any) -> None:
    machine = rehearse("xpu")
    words = ["-m", "autoprec.backends.shared.matmul_timing", "torch", "xpu:0", "float32"]
    done = machine.run([sys.executable, *words], seconds=120)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line in lines if "error" in line] == []
    assert any(line.get("product", {}).get("gflops") for line in lines)
