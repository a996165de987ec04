"""Estimates what a tuning would try on a device and could gain there, without measuring.

Every kernel of a step takes at least as long as its operations at the device's peak, and as the
bytes it reads and writes at the memory's bandwidth (the roofline model: Williams, Waterman and
Patterson, CACM 52/4, 2009); the step takes at least the sum, and at least as long as launching its
kernels one by one. Sixteen bits make products faster and activations smaller, and leave launches as
they are. The gain by these bounds is the most that can be expected, because whatever else a step
does takes its time under every policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoprec.core.device.facts import GIB, DeviceFacts
from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.policies import Proposal
from autoprec.core.dtypes import DType, Policy
from autoprec.core.measurement import Dimension, Kernel, TaskFacts
from autoprec.core.number_words import about_times, milliseconds, percent
from autoprec.core.speed.space import Space

#: Launching a kernel takes a GPU's driver some 4 microseconds from a bare loop, and a framework
#: that runs one operator after another 5 to 25. Sources: NVIDIA Technical Blog, "Getting Started
#: with CUDA Graphs" (3.8 microseconds); Jiahuang Lin, "From PyTorch op to kernel launch".
LAUNCH_SECONDS = 4e-6
FRAMEWORK_LAUNCH_SECONDS = 10e-6

#: Sizes of memory that accelerators are sold with, in GiB.
COMMON_MEMORY_GIB = (8, 16, 24, 32, 48, 80)

#: A gain below this is small: the search's own errors and what was left out are as large.
SMALL_GAIN = 1.3
NO_GAIN = 1.05
_CLEARLY_SMALLER_RATIO = 0.95

#: What convolutions in float32 reach of the peak where a library has good kernels: 68 to 70 % on
#: the V100, Titan XP and Quadro M2200 of an article on mixed precision in R (2020), whose net is
#: benchmarks/gpu/real/imagenette.py; it gained 1.1x at most.
USUAL_PEAK_SHARE = 0.68

#: What is bound by memory gains at most so much by 16 bits.
_HALF_THE_BYTES = 2.0

#: A bound this many times smaller is due to matrix units, not to smaller activations.
_WIDE_RATIO = 2.5

#: Of a backward kernel's operands (an output kept, its gradient, the input's gradient) the share
#: that is not among what the forward pass keeps.
_UNSAVED_OPERANDS_SHARE = 2 / 3

#: An update of all weights at once makes this many copies of them: Adam's are the denominators.
_UPDATE_COPIES = 2

KERNEL_LAUNCHING_KINDS = (DeviceKind.CUDA, DeviceKind.ROCM, DeviceKind.XPU, DeviceKind.MPS)


@dataclass(frozen=True)
class Estimate:
    """The least time of a policy's step at one batch, in seconds.

    `arithmetic_seconds` are spent in kernels that their operations bound, `memory_seconds` in those
    that reading and writing bounds; meanwhile all are launched, in `launch_seconds`. `at_most` is
    how many times faster than float32's the step can be by these bounds, `likely` where a framework
    launches its operators one by one.
    """

    policy: Policy
    batch: int
    arithmetic_seconds: float
    memory_seconds: float
    launch_seconds: float
    at_most: float = 1.0
    likely: float = 1.0

    @property
    def computing_seconds(self) -> float:
        """Return the seconds its kernels take, however they are launched."""
        return self.arithmetic_seconds + self.memory_seconds

    @property
    def framework_launch_seconds(self) -> float:
        """Return what a framework takes to launch its operators one by one."""
        return self.launch_seconds * FRAMEWORK_LAUNCH_SECONDS / LAUNCH_SECONDS

    @property
    def likely_seconds(self) -> float:
        """Return the longer of computing and a framework's launching."""
        return max(self.computing_seconds, self.framework_launch_seconds)

    @property
    def least_seconds(self) -> float:
        """Return the longer of computing and launching."""
        return max(self.computing_seconds, self.launch_seconds)

    @property
    def bound(self) -> str:
        """Return what bounds most of the step: "arithmetic", "memory" or "launches"."""
        if self.launch_seconds >= self.computing_seconds:
            return "launches"
        return "arithmetic" if self.arithmetic_seconds >= self.memory_seconds else "memory"


@dataclass(frozen=True)
class Fitting:
    """The largest batch whose predicted memory fits into `memory_bytes`; 0: not even one sample."""

    memory_bytes: int
    batch: int


@dataclass(frozen=True)
class MemoryPlan:
    """The predicted memory of a float32 step: what it needs at any batch, and for each sample.

    `fixed_bytes` are weights, gradients and the optimizer's state; `update_bytes` what the update
    needs in addition, when nothing is kept of the samples any more; `bytes_per_sample` what the
    forward pass keeps, and what the largest kernel of the backward pass needs in addition. A
    library's workspaces and the framework's own memory are not included.
    """

    fixed_bytes: int
    update_bytes: int
    bytes_per_sample: float
    batch: int
    fits: tuple[Fitting, ...]

    @property
    def peak_bytes(self) -> int:
        """Return the prediction at `batch`."""
        return self.fixed_bytes + max(int(self.bytes_per_sample * self.batch), self.update_bytes)


@dataclass(frozen=True)
class Plan:
    """What `tune` would do on a device, which need not be present.

    `explain_expectation` summarizes the estimates, a sentence for each batch; `figures` names the
    source of their peaks and bandwidth, empty where none are known. `recipes` is the size of the
    search's space, `off_alignment` the dimensions that are no multiple of `alignment`. `refusal`
    says why it would not begin at all: the rest is then what the hardware alone makes plausible.
    """

    task: str
    device: DeviceFacts
    facts: TaskFacts
    proposal: Proposal
    space: Space
    recipes: int
    figures: str
    estimates: tuple[Estimate, ...]
    expectation: tuple[str, ...]
    alignment: int
    off_alignment: tuple[Dimension, ...]
    memory: MemoryPlan | None
    refusal: str = ""
    notes: tuple[str, ...] = ()


def estimate_steps(
    task: TaskFacts, peaks: DeviceFacts, policies: Sequence[Policy], batches: Sequence[int]
) -> tuple[Estimate, ...]:
    """Estimate the steps of float32 and of `policies` on a device with these peaks, by batch.

    Empty where the task's kernels, or the device's bandwidth or its peak in float32, are not known;
    a policy whose peak is not known is left out.
    """
    found = []
    for batch in batches:
        base = _estimate(task, peaks, Policy.FLOAT32, batch)
        if base is None:
            return ()
        found.append(base)
        for policy in policies:
            own = _estimate(task, peaks, policy, batch)
            if policy is not Policy.FLOAT32 and own is not None:
                most = max(1.0, base.least_seconds / own.least_seconds)
                likely = min(most, max(1.0, base.likely_seconds / own.likely_seconds))
                found.append(replace(own, at_most=most, likely=likely))
    return tuple(found)


def _estimate(task: TaskFacts, peaks: DeviceFacts, policy: Policy, batch: int) -> Estimate | None:
    speed, bandwidth = _operations_per_second(peaks, policy), _bytes_per_second(peaks)
    if not speed or not bandwidth or not task.kernels:
        return None
    arithmetic = memory = 0.0
    for kernel in (*task.kernels, *_update_kernels(task, policy)):
        computing = kernel.count * kernel.flops_per_sample * batch / speed
        moving = kernel.count * _bytes_moved(kernel, policy, batch) / bandwidth
        if computing > moving:
            arithmetic += computing
        else:
            memory += moving
    launched = sum(kernel.count for kernel in task.kernels)
    launching = LAUNCH_SECONDS * launched if peaks.kind in KERNEL_LAUNCHING_KINDS else 0.0
    return Estimate(policy, batch, arithmetic, memory, launching)


def _update_kernels(task: TaskFacts, policy: Policy) -> tuple[Kernel, ...]:
    """Return the update, and under a mixed policy the weights' casts: 4 bytes read, 2 written."""
    update = Kernel(0.0, 0.0, 3 * task.trainable_bytes + 2 * task.optimizer_bytes)
    casts = Kernel(0.0, 0.0, 3 * task.parameter_bytes // 2)
    return (update, casts) if policy.mixed else (update,)


def _bytes_moved(kernel: Kernel, policy: Policy, batch: int) -> float:
    """Return the bytes a kernel moves; a product's weights, too, are half as large in 16 bits."""
    growing = kernel.bytes_per_sample * batch
    if not policy.mixed:
        return growing + kernel.fixed_bytes
    return growing / 2 + kernel.fixed_bytes / (2 if kernel.flops_per_sample else 1)


def _operations_per_second(peaks: DeviceFacts, policy: Policy) -> float:
    """Return floating-point operations per second, measured or the vendor's; 0 if not known."""
    fact = peaks.fact(policy.compute_dtype)
    return 1e9 * (fact.measured_gflops or 0.0) or 1e12 * (fact.peak_dense_tflops or 0.0)


def _bytes_per_second(peaks: DeviceFacts) -> float:
    """Return bytes per second; 0 where not known."""
    return 1e9 * (peaks.measured_memory_bandwidth_gbps or peaks.memory_bandwidth_gbps or 0.0)


def explain_expectation(
    estimated: Sequence[Estimate], peaks: DeviceFacts, task: TaskFacts, policies: Sequence[Policy]
) -> tuple[str, ...]:
    """Say what may be expected of the policies on this task, and why, for each batch."""
    if set(policies) <= {Policy.FLOAT32}:
        return (f"nothing is to be expected: {_why_no_faster_dtype(peaks)}",)
    gains = [each for each in estimated if each.policy is not Policy.FLOAT32]
    if not gains:
        missing = _what_is_missing(peaks, task)
        rough = _expect_of_products(peaks, policies)
        return (f"{rough or 'how much'} cannot be said without measuring: {missing}",)
    batches = sorted({each.batch for each in gains})
    at = {batch: [each for each in estimated if each.batch == batch] for batch in batches}
    said = [_expect_at_batch(batch, found, task) for batch, found in at.items()]
    if task.convolutions and peaks.fact(DType.TF32).support is not Support.NATIVE:
        said += filter(None, [_expect_without_kernels(at[batches[-1]])])
    return tuple(said)


def _expect_of_products(device: DeviceFacts, policies: Sequence[Policy]) -> str:
    """Say what the products alone promise; "" where none were measured on such a device.

    What is bound by memory gains at most by half the bytes.
    """
    mixed = [policy for policy in policies if policy.mixed]
    ratios = {policy: device.fact(policy.compute_dtype).family_ratio or 0.0 for policy in mixed}
    best = max(mixed, key=lambda policy: ratios[policy], default=None)
    if best is None or not ratios[best]:
        return ""
    return (
        f"at most about {about_times(max(_HALF_THE_BYTES, ratios[best]))} by {best}: "
        f"{best.compute_dtype} products were measured at {about_times(ratios[best])} float32's on "
        f"another {device.title}. How much of a step they are"
    )


def _best(estimated: Sequence[Estimate]) -> Estimate:
    return max(estimated, key=lambda each: (each.likely, each.at_most))


def _expect_without_kernels(estimated: Sequence[Estimate]) -> str:
    """Say how a step shows that its convolutions do not reach the 16-bit units; "" if none may.

    Libraries have no kernel of those units for some convolutions, which then run at float32's rate.
    Where float32's convolutions are TF32, they use such units themselves.
    """
    base, best = estimated[0], _best(estimated)
    if base.bound != "arithmetic" or not best.policy.mixed or best.at_most < _WIDE_RATIO:
        return ""
    seconds = base.arithmetic_seconds / USUAL_PEAK_SHARE
    dtype, share = best.policy.compute_dtype, best.arithmetic_seconds / seconds
    return (
        f"batch {base.batch}: if a step in {best.policy} takes as long as in float32, the library "
        f"has no kernels of {dtype}'s matrix units for these convolutions, as for some strides, "
        f"large filters and few channels: at {milliseconds(seconds)}, products at "
        f"{percent(USUAL_PEAK_SHARE)} of float32's peak are at {percent(share)} of {dtype}'s. "
        "`tune --explain` names the slowest operators"
    )


def _expect_at_batch(batch: int, estimated: Sequence[Estimate], task: TaskFacts) -> str:
    """Say what may be expected at one batch; `estimated` begins with float32's."""
    base, best = estimated[0], _best(estimated)
    kernels = sum(kernel.count for kernel in task.kernels)
    why = f"float32 takes at least {milliseconds(base.least_seconds)}, "
    if base.bound == "launches":
        why += (
            f"launching {kernels} kernels that compute for {milliseconds(base.computing_seconds)}"
        )
    else:
        share = base.memory_seconds / base.computing_seconds
        why += f"{share:.0%} of it in kernels bound by memory, which 16 bits at most halve"
    if best.at_most < NO_GAIN:
        return f"batch {batch}: nothing is to be expected: {why}"
    most = f"at most {about_times(best.at_most)} by {best.policy}"
    if best.likely < _CLEARLY_SMALLER_RATIO * best.at_most:
        launching = f"{FRAMEWORK_LAUNCH_SECONDS * 1e6:.0f} us each, as frameworks do it"
        why += f"; launching {kernels} kernels at {launching}, leaves {about_times(best.likely)}"
    elif best.bound != base.bound:
        why += f"; faster, it would be bound by {best.bound}"
    if best.likely < SMALL_GAIN:
        return f"batch {batch}: little is to be expected, {most}: {why}"
    if base.bound == "memory":
        return f"batch {batch}: little of the products' speed is to be expected, {most}: {why}"
    return f"batch {batch}: {most}: {why}"


def _why_no_faster_dtype(device: DeviceFacts) -> str:
    """Say why no 16-bit dtype is tried, in the catalogue's words."""
    reasons = []
    for dtype in (DType.FLOAT16, DType.BFLOAT16):
        fact = device.fact(dtype)
        if fact.support is not Support.NATIVE:
            reasons.append(f"{dtype} is {fact.support}{f' ({fact.reason})' if fact.reason else ''}")
    return "; ".join(reasons) or "only float32 was requested"


def _what_is_missing(peaks: DeviceFacts, task: TaskFacts) -> str:
    if not task.kernels:
        return "what the task computes could not be counted"
    if not _bytes_per_second(peaks):
        return "the catalogue has no memory bandwidth of this device"
    if not _operations_per_second(peaks, Policy.FLOAT32):
        why = peaks.fact(DType.FLOAT32).reason
        return f"the catalogue has no peak of this device in float32{f': {why}' if why else ''}"
    return "the catalogue has no peak of this device in 16 bits"


def plan_memory(task: TaskFacts, batch: int, available: int | None) -> MemoryPlan | None:
    """Predict the memory of a float32 step; None where what it keeps was not counted.

    `available` are the bytes that may be used, None for the sizes that accelerators are sold with.
    Where batches differ in shape, it is the memory of the longest.
    """
    if not task.saved_bytes_per_sample:
        return None
    fixed = task.parameter_bytes + task.trainable_bytes + task.optimizer_bytes
    update = _UPDATE_COPIES * task.trainable_bytes
    kernels = [kernel.bytes_per_sample for kernel in task.kernels]
    largest = max(task.most_kernel_bytes_per_sample, *kernels, 0.0)
    saved = max(task.saved_bytes_per_sample, task.most_saved_bytes_per_sample)
    growing = saved + _UNSAVED_OPERANDS_SHARE * largest
    limits = [available] if available else [size * GIB for size in COMMON_MEMORY_GIB]
    fits = tuple(
        Fitting(limit, int((limit - fixed) / growing) if limit > fixed + update else 0)
        for limit in limits
    )
    return MemoryPlan(fixed, update, growing, batch, fits)
