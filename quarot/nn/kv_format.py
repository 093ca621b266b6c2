"""How keys and values are stored in the cache: bits, groups, clip ratios and the rotation R3 of the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

import quarot.ops.hadamard
import quarot.ops.kv_append
import quarot.ops.kv_gather
from quarot.config import default_kv_clip
from quarot.field_types import check_types
from quarot.ops.kv_append import quantize_groups, rotate_heads
from quarot.ops.kv_layout import SUPPORTED_BITS, KVLayout, Side
from quarot.rotation.spec import HadamardSpec

if TYPE_CHECKING:
    from quarot.config import QuarotConfig


class CodeArguments(NamedTuple):
    """What every KV op takes to find codes in a page."""

    key_bits: int
    value_bits: int
    key_group: int
    value_group: int


def dividing_group(head_dim: int, group: int) -> int:
    """The widest group of at most ``group`` channels, a multiple of 16, that cuts ``head_dim`` evenly."""
    width = min(group, head_dim)
    while width > 16 and (head_dim % width or width % 16):
        width -= 1
    return width


@dataclass(frozen=True)
class KVFormat:
    """The storage format of one attention layer's keys and values (paper, section 4, "KV cache quantization").

    Attributes:
        key_bits, value_bits: 2, 3, 4, 8, or 16 for the model's own 16-bit floats.
        group: channels that share one scale and offset; cut down to a divisor of head_dim.
        key_clip, value_clip: constant clip ratio of the range of a group; None: the default of so many bits (the paper:
            0.95).
        rotation: R3, applied per head to keys (and to queries, so that it cancels in their product); None for none.
    """

    key_bits: int = 4
    value_bits: int = 4
    group: int = 128
    key_clip: float = None  # type: ignore[assignment]  # chosen by the bits in __post_init__
    value_clip: float = None  # type: ignore[assignment]
    rotation: HadamardSpec | None = None

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("key_bits", "value_bits"):
            if getattr(self, name) not in SUPPORTED_BITS:
                raise ValueError(f"KV cache: {name}={getattr(self, name)} is not one of {SUPPORTED_BITS}")
        if self.group < 1:
            raise ValueError(f"KV cache: group={self.group} must be positive")
        for name, bits in (("key_clip", self.key_bits), ("value_clip", self.value_bits)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default_kv_clip(bits))
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"KV cache: {name}={getattr(self, name)} must be above 0 and at most 1")

    @classmethod
    def from_config(cls, config: QuarotConfig, layer: int | None = None) -> KVFormat:
        """The format that a quarot configuration asks for, with the R3 of its rotation plan.

        ``layer`` is the index of the decoder layer, whose bits may be its own (:meth:`QuarotConfig.cache_of_layer`).
        """
        from quarot.rotation.plan import RotationPlan

        rotation = None if config.rotation is None else RotationPlan.from_dict(config.rotation).r3
        key_bits, value_bits, key_clip, value_clip = config.cache_of_layer(layer)
        return cls(key_bits, value_bits, config.kv_group_size, key_clip, value_clip, rotation)

    @property
    def quantizes(self) -> bool:
        """Whether anything is stored in fewer than 16 bits."""
        return min(self.key_bits, self.value_bits) < 16

    @property
    def clips(self) -> tuple[float, float]:
        """Clip ratios of keys and of values."""
        return self.key_clip, self.value_clip

    @property
    def rotate(self) -> tuple[int, int]:
        """(order, pow2) of R3 for the ops; (0, 0) for none. Keys of 16 bits have nothing to gain from it."""
        if self.rotation is None or self.key_bits == 16:
            return 0, 0
        return self.rotation.order, self.rotation.pow2

    def layout(self, head_dim: int) -> KVLayout:
        """Byte order of a page."""
        if self.rotation is not None and self.rotation.size != head_dim:
            raise ValueError(f"KV cache: R3 is for a head_dim of {self.rotation.size}, the model has {head_dim}")
        group = dividing_group(head_dim, self.group)
        return KVLayout(head_dim, self.key_bits, self.value_bits, group, group)

    def rotate_heads(self, x: Tensor) -> Tensor:
        """R3 on the last dimension of queries or keys, [..., head_dim]."""
        order, pow2 = self.rotate
        return quarot.ops.hadamard.hadamard(x, order, pow2, 1) if pow2 else x

    def append(self, pool: Tensor, key: Tensor, value: Tensor, slots: Tensor, layout: KVLayout) -> None:
        """Rotate, quantise and store tokens: key, value [T, kv_heads, head_dim], slots int64 [T] (-1: skip)."""
        quarot.ops.kv_append.kv_append(pool, key, value, slots, *arguments(layout), *self.clips, *self.rotate)

    def gather(self, pool: Tensor, slots: Tensor, layout: KVLayout, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Stored tokens, dequantised to ``dtype`` [T, kv_heads, head_dim]; keys stay rotated."""
        key, value = quarot.ops.kv_gather.kv_gather(pool, slots, *arguments(layout), dtype)
        return key, value

    def simulate(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as the cache would give them back, through the very same integers.

        Args:
            key, value: [B, kv_heads, S, head_dim].

        Returns:
            The dequantised pair in the same shapes and dtypes; keys are rotated by R3, so queries must be as well
            (:meth:`rotate_heads`).
        """
        if not key.is_cuda:
            return self._round(key, "key"), self._round(value, "value")
        return self._through_pages(key, value)

    def _round(self, x: Tensor, side: Side) -> Tensor:
        """The arithmetic of the reference ops without packing codes: several times faster where no kernel does it."""
        layout = self.layout(x.shape[-1])
        order, pow2 = self.rotate if side == "key" else (0, 0)
        wide = rotate_heads(x.float(), order, pow2) if pow2 else x
        if layout.bits(side) == 16:
            stored = (
                wide.to(x.dtype) if x.dtype in (torch.float16, torch.bfloat16) else wide.clamp(-65504, 65504).half()
            )
            return stored.to(x.dtype)
        clip = self.key_clip if side == "key" else self.value_clip
        codes, params = quantize_groups(wide, layout.bits(side), layout.group(side), clip)
        scale, offset = params.float().unbind(-1)
        groups = codes.unflatten(-1, (layout.groups(side), -1)).float()
        return (groups * scale[..., None] + offset[..., None]).flatten(-2).to(x.dtype)

    def _through_pages(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store in pages of its own and read back."""
        batch, heads, length, head_dim = key.shape
        layout = self.layout(head_dim)
        tokens = batch * length
        pool = torch.empty(layout.pool_shape(-(-tokens // 64), heads, 64), dtype=torch.uint8, device=key.device)
        slots = torch.arange(tokens, device=key.device)
        self.append(pool, token_major(key), token_major(value), slots, layout)
        stored = self.gather(pool, slots, layout, key.dtype)
        stored_key, stored_value = (x.view(batch, length, heads, head_dim).transpose(1, 2) for x in stored)
        return stored_key, stored_value


def check_cache(config: QuarotConfig, layers: int, head_dim: int) -> None:
    """Check that the cache which ``config`` asks for can hold the keys and values of this many layers.

    Raises:
        ValueError: bits for another number of layers, or heads or groups that do not fit.
    """
    if config.kv_bits_by_layer and len(config.kv_bits_by_layer) != layers:
        raise ValueError(f"kv_bits_by_layer has {len(config.kv_bits_by_layer)} pairs for {layers} decoder layers")
    if config.rounds_cache:
        KVFormat.from_config(config).layout(head_dim)


def arguments(layout: KVLayout) -> CodeArguments:
    """The bits and groups of a layout, in the order of the ops' arguments."""
    return CodeArguments(layout.key_bits, layout.value_bits, layout.key_group, layout.value_group)


def token_major(x: Tensor) -> Tensor:
    """[B, heads, S, head_dim] -> [B * S, heads, head_dim]."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
