"""What a safetensors file says it holds, from its header alone, once the file is known to be whole."""

from __future__ import annotations

import json
import os
import struct
from typing import Any, NamedTuple


class StoredTensor(NamedTuple):
    """One entry of a header: the dtype as safetensors writes it (``"F16"``, ``"U8"``), and the shape."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Every tensor of a file by name.

    Raises:
        ValueError: not a safetensors file, or not as long as its header says.
    """
    return _read(path)[0]


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """What the writer of a file noted beside its tensors; raises as :func:`read_header`."""
    return _read(path)[1]


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    size = os.path.getsize(path)
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if not 0 < length <= size - 8:
                raise ValueError(f"its header claims {length} of {size} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        metadata = dict(header.pop("__metadata__", None) or {})
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size != end:
            raise ValueError(f"it has {size} bytes and its header describes {end}")
        tensors = {name: StoredTensor(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        return tensors, metadata
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise ValueError(f"{path} is corrupt or truncated: {error!r}; copy or save the checkpoint again") from None
