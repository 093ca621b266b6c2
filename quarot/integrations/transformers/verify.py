"""Checks a checkpoint against the model it is about to fill.

transformers fills missing tensors with random numbers and a log line; that is a wrong model, so here it is an error.
"""

from __future__ import annotations

import json
import os
import struct
import types
from collections.abc import Iterable
from typing import Any

from torch import nn

from quarot.architectures import architecture_of


def verify_checkpoint(model: nn.Module, files: Iterable[str | os.PathLike[str]] | None) -> None:
    """Raise unless the safetensors ``files`` are whole and hold every tensor of ``model`` in its shape.

    Raises:
        ValueError: a file is truncated or not safetensors, tensors are missing, or shapes differ.
    """
    if not files:
        return
    stored: dict[str, tuple[int, ...]] = {}
    for file in files:
        if os.fspath(file).endswith(".safetensors"):
            stored.update(_shapes(os.fspath(file)))
    if not stored:
        raise ValueError(f"quarot checkpoints are safetensors; found only {', '.join(map(str, files))}")
    where = os.path.dirname(os.fspath(next(iter(files))))
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in _tied(model)}
    if architecture_of(model).experts is None:  # transformers stores experts one by one, under other names
        _refuse([name for name in wanted if name not in stored], where)
    for name, shape in wanted.items():
        if stored.get(name, shape) != shape:
            raise ValueError(
                f"the checkpoint in {where} has {name} of shape {list(stored[name])}, config.json wants {list(shape)}"
            )


def watch_missing(model: Any) -> None:
    """Make loading fail where transformers would only log: tensors it could not find, after all its renaming."""

    def refuse_missing(self: Any, loading_info: Any) -> None:
        type(self)._adjust_missing_and_unexpected_keys(self, loading_info)
        del self._adjust_missing_and_unexpected_keys
        _refuse(sorted(loading_info.missing_keys), self.config.name_or_path)

    model._adjust_missing_and_unexpected_keys = types.MethodType(refuse_missing, model)


def _refuse(missing: list[str], where: str) -> None:
    if missing:
        raise ValueError(
            f"the checkpoint in {where} lacks {len(missing)} tensors: {', '.join(missing[:3])}, ..; "
            "it is incomplete or its config.json belongs to another checkpoint"
        )


def _tied(model: nn.Module) -> set[str]:
    return set(getattr(model, "all_tied_weights_keys", None) or {})


def _shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Tensor shapes from the header of a safetensors file, which must be as long as the header says."""
    size = os.path.getsize(path)
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if not 0 < length <= size - 8:
                raise ValueError(f"its header claims {length} of {size} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size != end:
            raise ValueError(f"it has {size} bytes and its header describes {end}")
        return {name: tuple(entry["shape"]) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{path} is corrupt or truncated: {error}; copy or save the checkpoint again") from None
