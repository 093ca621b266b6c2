"""Checks a checkpoint against the model it is about to fill, and the values once they are there.

transformers fills missing tensors with random numbers, casts those of another dtype and drops those it has no place
for, with a log line at most; each is a wrong model, so here each is an error.
"""

from __future__ import annotations

import math
import os
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from quarot.architectures import architecture_of
from quarot.integrations.safetensors_header import StoredTensor, read_header
from quarot.nn.quant_linear import QuantLinear
from quarot.quantization.grid import dequantize

_NAMES = {torch.uint8: "U8", torch.int8: "I8", torch.float32: "F32"}
"""How safetensors calls the dtypes of codes, scales and zero points."""


def verify_checkpoint(model: nn.Module, files: Iterable[str | os.PathLike[str]] | None) -> None:
    """Raise unless the safetensors ``files`` are whole and hold every tensor of ``model``.

    Raises:
        ValueError: a file is truncated or not safetensors, tensors are missing, shapes differ, or codes or
            scales have been cast.
    """
    if not files:
        return
    stored: dict[str, StoredTensor] = {}
    for file in files:
        if os.fspath(file).endswith(".safetensors"):
            stored.update(read_header(file))
    if not stored:
        raise ValueError(f"quarot checkpoints are safetensors; found only {', '.join(map(str, files))}")
    where = os.path.dirname(os.fspath(next(iter(files))))
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in _tied(model)}
    if architecture_of(model).experts is None:  # transformers stores experts one by one, under other names
        _refuse([name for name in wanted if name not in stored], where)
    for name, shape in wanted.items():
        if name in stored and stored[name].shape != shape:
            found = list(stored[name].shape)
            raise ValueError(f"the checkpoint in {where} has {name} of shape {found}, config.json wants {list(shape)}")
    for name, dtype in _exact_dtypes(model):
        if name in stored and stored[name].dtype != _NAMES[dtype]:
            raise ValueError(
                f"the checkpoint in {where} has {name} in {stored[name].dtype}, which must be {_NAMES[dtype]}: it was "
                "cast or belongs to another config.json; save the quantised model again"
            )


@torch.no_grad()
def verify_values(model: nn.Module) -> None:
    """Raise where the small tensors of a loaded model cannot be what was saved: a few bytes make every output NaN.

    Looked at are scales and zero points, norms and biases (all that is not a matrix, so that it costs nothing beside
    loading), except for offloaded ones. A scale is positive, or zero where every code stands for zero.

    Raises:
        ValueError: with the tensor's name.
    """
    found: dict[torch.device, list[tuple[str, QuantLinear | None, torch.Tensor]]] = {}
    for path, module in model.named_modules():
        linear = module if isinstance(module, QuantLinear) else None
        for name, tensor in module.named_parameters(recurse=False):
            small = tensor.dim() < 2 or (linear is not None and name in ("weight_scale", "weight_zero"))
            if small and tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
                scaled = linear if name == "weight_scale" else None
                extremes = torch.stack(tensor.aminmax()).float()
                found.setdefault(tensor.device, []).append((f"{path}.{name}".lstrip("."), scaled, extremes))
    for entries in found.values():
        ranges = torch.stack([extremes for *_, extremes in entries]).tolist()  # one synchronisation a device
        for (name, linear, _), (low, high) in zip(entries, ranges, strict=True):
            wrong = _wrong_values(linear, low, high)
            if wrong:
                raise ValueError(
                    f"{model.config.name_or_path}: {name} {wrong}: the checkpoint is damaged, "  # type: ignore[union-attr]
                    "or overflows the dtype it is loaded in; copy it or quantise the model again"
                )


def _wrong_values(scaled: QuantLinear | None, low: float, high: float) -> str | None:
    """What is wrong with a tensor that lies between ``low`` and ``high``; with ``scaled`` it is that layer's scale."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "holds NaN or infinity"
    if scaled is not None and low < 0:
        return f"is negative ({low:g})"
    if scaled is not None and low == 0:
        codes, zero, scale = scaled.codes().float(), scaled.weight_zero, scaled.weight_scale
        if dequantize(codes, (scale == 0).float(), zero).any():
            return "is zero where there are weights"
    return None


def watch_keys(model: Any) -> None:
    """Make loading fail where transformers would only log: tensors that one side lacks, after all its renaming."""

    def refuse(self: Any, loading_info: Any) -> None:
        type(self)._adjust_missing_and_unexpected_keys(self, loading_info)
        del self._adjust_missing_and_unexpected_keys
        _refuse(sorted(loading_info.missing_keys), self.config.name_or_path)
        _refuse_unexpected(sorted(loading_info.unexpected_keys), self.config.name_or_path)

    model._adjust_missing_and_unexpected_keys = types.MethodType(refuse, model)


def _refuse(missing: list[str], where: str) -> None:
    if missing:
        raise ValueError(
            f"the checkpoint in {where} lacks {_listed(missing)}; "
            "it is incomplete or its config.json belongs to another checkpoint"
        )


def _refuse_unexpected(names: list[str], where: str) -> None:
    if names:
        raise ValueError(
            f"the checkpoint in {where} holds what its config.json has no place for, {_listed(names)}; "
            "its config.json was changed or belongs to another checkpoint"
        )


def _listed(names: list[str]) -> str:
    """``5 tensors: a, b, c, ..``."""
    count = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
    return f"{count}: {', '.join(names[:3])}{', ..' if len(names) > 3 else ''}"


def _exact_dtypes(model: nn.Module) -> Iterator[tuple[str, torch.dtype]]:
    """Names and dtypes of codes, scales and zero points, which no cast leaves what they are."""
    for path, module in model.named_modules():
        if isinstance(module, QuantLinear):
            for name, tensor in module.named_parameters():
                if name != "bias" and not (name == "qweight" and module.w_bits == 16):
                    yield f"{path}.{name}", tensor.dtype


def _tied(model: nn.Module) -> set[str]:
    return set(getattr(model, "all_tied_weights_keys", None) or {})
