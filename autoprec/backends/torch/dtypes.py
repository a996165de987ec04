"""Torch's dtypes by autoprec's names; nothing else in the backend maps them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autoprec.core.dtypes import DType, Policy

TORCH_DTYPES: Mapping[DType, torch.dtype] = {
    DType.FLOAT32: torch.float32,
    DType.TF32: torch.float32,
    DType.BFLOAT16: torch.bfloat16,
    DType.FLOAT16: torch.float16,
}
"""What tensors are kept in for each; float8 has no dtype of its own."""

LOW_DTYPES = tuple(TORCH_DTYPES[each] for each in (DType.BFLOAT16, DType.FLOAT16))

EXACT_DTYPES = (torch.float64, torch.complex128)
"""What autocast leaves as it is."""

FULL_DTYPES = {**dict.fromkeys(LOW_DTYPES, torch.float32), torch.complex32: torch.complex64}
"""What the dtypes of 16-bit numbers are cast up to."""


def autocast_dtype(policy: Policy) -> torch.dtype | None:
    """Return what autocast computes in under a policy; None where there is no autocast."""
    return TORCH_DTYPES[policy.compute_dtype] if policy.mixed else None


def dtype_name(dtype: object) -> str:
    """Return the name of torch's dtype or of ours, without "torch."; float32 for None."""
    return str(dtype or torch.float32).removeprefix("torch.")
