"""Online Hadamard transforms in half precision, for the paper's table 10 (appendix A.7): an experiment.

quarot's transforms accumulate in fp32 and hand over to the quantiser without rounding. The paper's fp16 transforms
round to fp16 on the way in, between the power-of-two factor and the dense one, and on the way out; so does this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quarot.architectures import architecture_of, decoder_layers
from quarot.nn.kv_format import KVFormat
from quarot.nn.rotated_linear import RotatedLinear
from quarot.ops.hadamard import hadamard
from quarot.rotation.spec import HadamardSpec


def half_hadamard_transform(x: Tensor, spec: HadamardSpec) -> Tensor:
    """The transform of the last dimension of x, in the dtype of x, through fp16 (see the module)."""
    y = hadamard(x.to(torch.float16), 1, spec.pow2, spec.inner)
    return hadamard(y, spec.order, 1, spec.pow2 * spec.inner).to(x.dtype)


@contextmanager
def half_hadamard(model: Any) -> Iterator[None]:
    """Inside the block every online transform of a rotated model goes through fp16; without a cache (perplexity)."""
    attention = architecture_of(model).attention
    changed: list[tuple[Any, str, Any]] = []
    handles = []

    def set_for_now(owner: Any, name: str, value: Any) -> None:
        changed.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    for module in model.modules():
        spec = getattr(module, "input_rotation", None)
        if isinstance(spec, HadamardSpec):
            handles.append(module.register_forward_pre_hook(_transforming(spec)))
            nothing = HadamardSpec(spec.size, 1, 1) if isinstance(module, RotatedLinear) else None
            set_for_now(module, "input_rotation", nothing)
    for _, layer in decoder_layers(model):
        owner = layer.get_submodule(attention)
        stored = getattr(owner, "quarot_kv_format", None)
        if stored is not None and stored.rotation is not None:
            fields = {field.name: getattr(stored, field.name) for field in dataclasses.fields(KVFormat)}
            set_for_now(owner, "quarot_kv_format", _HalfKVFormat(**fields))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for owner, name, value in reversed(changed):
            setattr(owner, name, value)


def _transforming(spec: HadamardSpec) -> Any:
    def hook(_: Any, args: tuple[Tensor, ...]) -> Tensor:
        return half_hadamard_transform(args[0], spec)

    return hook


@dataclass(frozen=True)
class _HalfKVFormat(KVFormat):
    """R3 through fp16."""

    def rotate_heads(self, x: Tensor) -> Tensor:
        return x if self.rotation is None or self.key_bits == 16 else half_hadamard_transform(x, self.rotation)

    def simulate(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        plain = KVFormat(self.key_bits, self.value_bits, self.group, *self.clips)
        return plain.simulate(self.rotate_heads(key), value)
