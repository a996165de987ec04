"""What Keras's dtypes are: their names, which are 16-bit floating, and their sizes."""

from __future__ import annotations

from typing import Any

from autoprec.core.dtypes import DType

LOW_DTYPES = (DType.BFLOAT16.value, DType.FLOAT16.value)

_ITEM_BYTES = {**dict.fromkeys(LOW_DTYPES, 2), "float64": 8, "int64": 8}
_ITEM_BYTES |= {"int8": 1, "uint8": 1, "bool": 1}


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of Keras, of NumPy or of any backend; "None" for none."""
    return str(getattr(dtype, "name", dtype)).rpartition(".")[2]


def is_low(dtype: Any) -> bool:
    """Return whether a dtype is a 16-bit floating one."""
    return dtype_name(dtype) in LOW_DTYPES


def item_bytes(dtype: Any) -> int:
    """Return the bytes that one number of a dtype takes."""
    return _ITEM_BYTES.get(dtype_name(dtype), 4)
