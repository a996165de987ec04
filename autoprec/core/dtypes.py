"""Number formats and precision policies, which everything else is expressed in.

A `DType` is a number format of the device; a `Policy` is a choice of compute and variable dtype,
named as in Keras. Short forms ("bf16", "fp16-mixed", "fp32") are accepted by `Policy.parse` and
`DType.parse` only, at the border.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from autoprec.errors import UsageError


class DType(StrEnum):
    """A number format a device may compute in."""

    FLOAT32 = "float32"
    TF32 = "tf32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT8 = "float8"

    @classmethod
    def parse(cls, text: str) -> DType:
        """Read a dtype from its name or a short form such as "bf16"."""
        return cls(_lookup(text, _DTYPE_NAMES, "dtype"))

    @property
    def limits(self) -> FloatLimits:
        """Return the format's exponents and precision."""
        return _LIMITS[self]


@dataclass(frozen=True)
class FloatLimits:
    """What a binary floating-point format can hold.

    Values are exponents of two: the largest finite number is just under 2**(max_exponent + 1), the
    smallest normal one 2**min_exponent, the smallest subnormal one
    2**(min_exponent - mantissa_bits). Source: IEEE 754-2019 for float32 and float16; Google's
    bfloat16 note (8 exponent, 7 mantissa bits); NVIDIA's A100 whitepaper for TF32 (8 and 10);
    the OCP FP8 specification (E4M3) for float8.
    """

    bits: int
    max_exponent: int
    min_exponent: int
    mantissa_bits: int

    @property
    def unit_roundoff(self) -> float:
        """Return the largest relative error of rounding to nearest: 2**-(mantissa_bits + 1)."""
        return 2.0 ** -(self.mantissa_bits + 1)


_LIMITS = {
    DType.FLOAT32: FloatLimits(32, 127, -126, 23),
    DType.TF32: FloatLimits(19, 127, -126, 10),
    DType.BFLOAT16: FloatLimits(16, 127, -126, 7),
    DType.FLOAT16: FloatLimits(16, 15, -14, 10),
    DType.FLOAT8: FloatLimits(8, 8, -6, 3),
}

_DTYPE_NAMES = {
    **{dtype.value: dtype.value for dtype in DType},
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp8": "float8",
    "f8": "float8",
}


class Policy(StrEnum):
    """A precision choice for training: what is computed in, and what the weights are kept in."""

    FLOAT32 = "float32"
    TF32 = "tf32"
    MIXED_BFLOAT16 = "mixed_bfloat16"
    MIXED_FLOAT16 = "mixed_float16"

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read a policy from its name or a short form such as "bf16-mixed"."""
        if "float8" in text.lower() or "fp8" in text.lower():
            raise UsageError(
                f"policy {text!r} given, but float8 refines {cls.MIXED_BFLOAT16} in compiled "
                f"recipes. Give {cls.MIXED_BFLOAT16} and --compile: float8 is then tried if the "
                "device has it and the model's linear layers are wide"
            )
        return cls(_lookup(text, _POLICY_NAMES, "policy"))

    @property
    def compute_dtype(self) -> DType:
        """Return the dtype matrix products run in."""
        return _COMPUTE[self]

    @property
    def variable_dtype(self) -> DType:
        """Return the dtype weights, gradients and optimizer state are kept in."""
        return DType.FLOAT32

    @property
    def mixed(self) -> bool:
        """Return whether the compute dtype is a 16-bit one."""
        return self.compute_dtype in (DType.BFLOAT16, DType.FLOAT16)

    def name_with(self, weights_in: str) -> str:
        """Name the policy for a model; what computes in 16 bits by itself is no float32.

        `weights_in` is the dtype it does that in, empty if the model is a common one.
        """
        return f"own {weights_in}" if weights_in and self is Policy.FLOAT32 else self.value

    def compute_dtype_with(self, weights_in: str) -> DType:
        """Return the dtype matrix products run in if the model's own is `weights_in`."""
        return DType(weights_in) if weights_in and self is Policy.FLOAT32 else self.compute_dtype

    @property
    def needs_loss_scale(self) -> bool:
        """Return whether gradients can underflow in the compute dtype unless the loss is scaled."""
        return self is Policy.MIXED_FLOAT16


def own_precision(weights: Iterable[tuple[str, int, bool]]) -> str:
    """Return the 16-bit dtype that a model uses its weights in by itself; empty where in none.

    `weights` are the dtype of each, its number of elements, and whether it trains. It is the dtype
    of all that train, or of most elements, frozen ones too.
    """
    found = list(weights)
    trained = {dtype for dtype, _, trains in found if trains}
    for low in (DType.BFLOAT16.value, DType.FLOAT16.value):
        most = 2 * sum(n for dtype, n, _ in found if dtype == low) > sum(n for _, n, _ in found)
        if most or trained == {low}:
            return low
    return ""


_COMPUTE = {
    Policy.FLOAT32: DType.FLOAT32,
    Policy.TF32: DType.TF32,
    Policy.MIXED_BFLOAT16: DType.BFLOAT16,
    Policy.MIXED_FLOAT16: DType.FLOAT16,
}

_POLICY_NAMES = {
    **{policy.value: policy.value for policy in Policy},
    **dict.fromkeys(("fp32", "f32", "32", "32-true"), "float32"),
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed", "bf16_mixed"), "mixed_bfloat16"),
    **dict.fromkeys(("fp16", "float16", "16-mixed", "fp16-mixed", "fp16_mixed"), "mixed_float16"),
}


def _lookup(text: str, names: dict[str, str], what: str) -> str:
    key = text.strip().lower()
    if key in names:
        return names[key]
    close = difflib.get_close_matches(key, names, n=1)
    hint = f" Did you mean {names[close[0]]}?" if close else ""
    known = ", ".join(dict.fromkeys(names.values()))
    raise UsageError(f"unknown {what} {text!r}: expected one of {known}.{hint}")
