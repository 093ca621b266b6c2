"""``QuantLinear``: a linear layer on integer codes. N outputs, K inputs, M tokens (all leading dimensions together)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quarot.config import QuarotConfig
from quarot.ops.float32_matmul import float32_matmul
from quarot.ops.gemm_w4a4 import gemm_w4a4
from quarot.ops.gemm_w8a8 import gemm_w8a8
from quarot.ops.hadamard import hadamard
from quarot.ops.hadamard_quantize import hadamard_quantize
from quarot.ops.inference_only import inference_only
from quarot.ops.quantize_per_token import UPPER_ROWS, quantize_per_token
from quarot.quantization.fit import check_fits
from quarot.quantization.grid import dequantize
from quarot.quantization.packing import pack_int8
from quarot.quantization.storage import load, store, stored_shape
from quarot.rotation.spec import HadamardSpec

SETTINGS = ("a_bits", "a_clip", "a_group_size", "input_rotation")
"""How a layer rounds its input."""


class QuantLinear(nn.Module):
    """``y = dequantised(quantise(H x)) @ dequantised(W)^T + bias`` on integers (paper, section 4, stage 2).

    Per call: the online rotation (where the layer has one) and the per-token quantiser in one op, an integer GEMM with
    an int32 accumulator, scales in fp32, cast to the input's dtype last. ``a_bits=16`` multiplies by the dequantised
    weight.

    Parameters (none of them trainable; never named ``weight``, so that loading into a plain layer fails loudly):
        qweight: codes, layout by ``w_bits`` (:mod:`quarot.quantization.storage`); 16 bits: the weight itself [N, K].
        weight_scale: fp32 [N] or [N, G].
        weight_zero: fp32 like the scale, asymmetric weights only.
        bias: [N] in the model's dtype, or None.

    Casting the module (``.half()``, ``.to(dtype)``) keeps codes and scales as they are. The constructor makes an empty
    skeleton, as loading needs it; :meth:`from_linear` makes a filled one.

    Raises:
        ValueError: a group size does not fit K.
    """

    joint: Any = None
    """The tensors that this layer's are views of (:class:`quarot.nn.joint.Joint`). It belongs to the layer
    and is let go as soon as a parameter moves, so that the memory is free at once and not at the next forward."""

    moves = 0
    """How often parameters of any layer were moved, assigned or joined: who keeps many addresses looks here first."""

    changes = 0
    """How often one of ``SETTINGS`` was set, of any layer: who keeps what they were looks here first."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        w_bits: int = 4,
        w_symmetric: bool = True,
        w_group_size: int | None = None,
        a_bits: int = 4,
        a_clip: float = 0.9,
        a_group_size: int | None = None,
        input_rotation: HadamardSpec | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        fields = QuarotConfig(w_bits=w_bits, w_group_size=w_group_size, a_bits=a_bits, a_group_size=a_group_size)
        check_fits("QuantLinear", in_features, fields.replace(a_clip=a_clip))
        if input_rotation is not None and input_rotation.size != in_features:
            raise ValueError(f"QuantLinear: a rotation of size {input_rotation.size} does not fit {in_features} inputs")
        self.in_features, self.out_features = in_features, out_features
        self.w_bits, self.w_symmetric, self.w_group_size = w_bits, w_symmetric, w_group_size
        self.a_bits, self.a_clip, self.a_group_size = a_bits, a_clip, a_group_size
        self.input_rotation = input_rotation
        dtype = dtype or torch.get_default_dtype()
        shape, kind = stored_shape(out_features, in_features, w_bits, dtype)
        per_row = () if w_group_size in (None, in_features) else (in_features // (w_group_size or 1),)
        scales = None if w_bits == 16 else torch.empty((out_features, *per_row), dtype=torch.float32, device=device)
        self.qweight = _frozen(torch.empty(shape, dtype=kind, device=device))
        self.weight_scale = _frozen(scales)
        self.weight_zero = _frozen(None if w_symmetric or scales is None else torch.empty_like(scales))
        self.bias = _frozen(torch.empty(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        config: QuarotConfig,
        codes: torch.Tensor | None,
        scale: torch.Tensor | None,
        zero: torch.Tensor | None = None,
    ) -> QuantLinear:
        """The quantised form of an ``nn.Linear`` or ``RotatedLinear``.

        Args:
            linear: gives bias, dtype, device and the online rotation.
            config: of this layer (:meth:`QuarotConfig.for_module`).
            codes, scale, zero: centred int8 codes [N, K] and their grid; codes None (``w_bits`` 16) keeps the weight.
        """
        weight = linear_weight(linear)
        n, k = weight.shape
        bias = getattr(linear, "bias", None)
        rotation = getattr(linear, "input_rotation", None)
        layer = cls(
            k, n, bias is not None, **run_time(config), input_rotation=rotation, dtype=weight.dtype, device="meta"
        )
        device = weight.device
        layer.qweight = _frozen(weight.detach() if codes is None else store(codes.to(device), config.w_bits))
        if scale is not None:
            layer.weight_scale = _frozen(scale.to(device).reshape(layer.weight_scale.shape).contiguous())
        if zero is not None:
            layer.weight_zero = _frozen(zero.to(device).reshape(layer.weight_scale.shape).contiguous())
        layer.bias = _frozen(None if bias is None else bias.detach())
        return layer.train(linear.training)

    def codes(self) -> torch.Tensor:
        """Centred int8 codes [N, K]."""
        return load(self.qweight, self.out_features, self.in_features, self.w_bits)

    def dequantize(self) -> torch.Tensor:
        """The weight the codes stand for: fp32 [N, K] (the weight itself, in its dtype, at 16 bits)."""
        if self.w_bits == 16:
            return self.qweight
        return dequantize(self.codes(), self.weight_scale, self.weight_zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N] in the dtype of x; with a gradient only where activations are not quantised."""
        if self.a_bits == 16:
            return F.linear(self._rotate(x), self.dequantize().to(x.dtype), self.bias)
        return inference_only("QuantLinear", self._forward_integers, x)

    def _forward_integers(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:-1], self.out_features)
        if self.a_group_size is not None:
            return self._forward_activation_groups(x).view(shape)
        codes, scale = self.quantize_input(x)
        return self.forward_codes(codes, scale, x.dtype).view(shape)

    def quantize_input(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and row scales of x [..., K], after the online rotation; siblings on the same input may share them."""
        packed, upper = self._code_layout(x)
        r = self.input_rotation
        if r is None:
            return quantize_per_token(x, self.a_bits, self.a_clip, packed, upper)
        return hadamard_quantize(x, r.order, r.pow2, r.inner, self.a_bits, self.a_clip, packed, upper)

    def forward_codes(self, codes: torch.Tensor, row_scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[M, N] in ``dtype`` from the output of :meth:`quantize_input`."""
        if self.w_bits == 16:
            values = codes[:, : self.in_features].float() * row_scale[:, None]
            return F.linear(values.to(dtype), self.qweight.to(dtype), self.bias)
        symmetric = self.weight_zero is None
        bias, out_dtype = (self.bias, dtype) if symmetric else (None, torch.float32)
        if self.w_bits == 4:
            packed = codes.dtype == torch.uint8
            out = gemm_w4a4(codes, row_scale, self.qweight, self.weight_scale, bias, out_dtype, packed)
        else:
            wide = self.qweight if self.w_bits == 8 else pack_int8(self.codes())
            out = gemm_w8a8(codes, row_scale, wide, self.weight_scale, bias, out_dtype)
        return out if symmetric else self._with_zeros(out, codes, row_scale).to(dtype)

    def _with_zeros(self, out: torch.Tensor, codes: torch.Tensor, row_scale: torch.Tensor) -> torch.Tensor:
        """Asymmetric weights: ``scale * (code - zero)`` is ``-row_scale * sum(codes) * scale * zero`` more."""
        offset = (self.weight_scale * self.weight_zero).reshape(self.out_features, -1)
        sums = codes[:, : self.in_features].view(codes.shape[0], offset.shape[1], -1).sum(-1, dtype=torch.int32)
        sums = sums.float() * row_scale[:, None]
        out = out - (sums * offset.T if offset.shape[1] == 1 else float32_matmul(sums, offset.T))
        return out if self.bias is None else out + self.bias.float()

    def _forward_activation_groups(self, x: torch.Tensor) -> torch.Tensor:
        """One scale per token and group of inputs: a GEMM a group, added in fp32."""
        size = self.a_group_size or self.in_features
        groups = self.in_features // size
        rows = self._rotate(x.float()).reshape(-1, self.in_features)
        codes, scale = quantize_per_token(rows.view(-1, groups, size), self.a_bits, self.a_clip)
        codes, scale = codes.view(rows.shape), scale.view(-1, groups)
        if self.w_bits == 16:
            values = codes.view(*scale.shape, size).float() * scale[..., None]
            return F.linear(values.view(rows.shape).to(x.dtype), self.qweight.to(x.dtype), self.bias)
        weights = self.codes().chunk(groups, 1)
        # Weight groups lie inside activation groups; a scale per channel counts for each of them.
        scales = _per_group(self.weight_scale, groups)
        zeros = (None,) * groups if self.weight_zero is None else _per_group(self.weight_zero, groups)
        total = rows.new_zeros(rows.shape[0], self.out_features)
        for c, s, w, w_scale, w_zero in zip(
            codes.chunk(groups, 1), scale.unbind(1), weights, scales, zeros, strict=True
        ):
            c, s = c.contiguous(), s.contiguous()
            total += gemm_w8a8(c, s, w.contiguous(), w_scale, None, torch.float32)
            if w_zero is not None:
                sums = c.view(c.shape[0], w_scale.shape[1], -1).sum(-1, dtype=torch.int32)
                total -= float32_matmul(sums.float() * s[:, None], (w_scale * w_zero).T)
        return (total if self.bias is None else total + self.bias.float()).to(x.dtype)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        r = self.input_rotation
        return x if r is None else hadamard(x, r.order, r.pow2, r.inner)

    def _code_layout(self, x: torch.Tensor) -> tuple[bool, bool]:
        """``packed`` and ``upper`` of the op that quantises x [..., K] for this layer."""
        packed = self._packs_activations(x)
        return packed, x.is_cuda and not packed and self.a_bits <= 4 and x.shape[:-1].numel() >= UPPER_ROWS

    def _packs_activations(self, x: torch.Tensor) -> bool:
        # Ampere and Ada multiply int4 by int4 at twice the int8 rate; Hopper dropped it, so codes stay int8 there.
        return x.is_cuda and self.a_bits == self.w_bits == 4 and self.w_symmetric and _has_int4_mma(x.device.index)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantLinear:
        kept = {id(p) for p in (self.qweight, self.weight_scale, self.weight_zero) if p is not None}
        if self.w_bits == 16:
            kept.discard(id(self.qweight))

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            out = fn(tensor)
            if out is not tensor:
                self._moved()
            return tensor.to(out.device) if id(tensor) in kept and out.dtype != tensor.dtype else out

        return super()._apply(keep_dtype, recurse)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in ``nn.Module``: also what assigning a parameter does."""
        super().register_parameter(name, param)
        self._moved()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in SETTINGS:
            QuantLinear.changes += 1

    def _moved(self) -> None:
        self.joint = None
        QuantLinear.moves += 1

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have tensors of their own, which lie wherever they were put."""
        return vars(self) | {"joint": None}

    def extra_repr(self) -> str:
        """``K, N, w4 sym per channel, a4 per token clip 0.9, rotation``."""
        weights = f"w{self.w_bits}"
        if self.w_bits < 16:
            weights += f" {'sym' if self.w_symmetric else 'asym'} {_granularity(self.w_group_size, 'channel')}"
        activations = f"a{self.a_bits}"
        if self.a_bits < 16:
            activations += f" {_granularity(self.a_group_size, 'token')} clip {self.a_clip:g}"
        rotation = "" if self.input_rotation is None else f", rotation={self.input_rotation}"
        shape = f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"
        return f"{shape}, {weights}, {activations}{rotation}"


def run_time(config: QuarotConfig) -> dict[str, Any]:
    """The fields of a layer's configuration that its :class:`QuantLinear` is made with."""
    names = ("w_bits", "w_symmetric", "w_group_size", "a_bits", "a_clip", "a_group_size")
    return {name: getattr(config, name) for name in names}


def linear_weight(linear: nn.Module) -> torch.Tensor:
    """The weight [N, K] of an ``nn.Linear`` or a ``RotatedLinear``."""
    weight: Any = getattr(linear, "rotated_weight", None)
    if weight is None:
        weight = linear.weight
    return weight


def _per_group(scale: torch.Tensor, groups: int) -> tuple[torch.Tensor, ...]:
    """[N] or [N, G] -> ``groups`` contiguous parts [N, G / groups] (at least one column each)."""
    wide = scale.reshape(scale.shape[0], -1)
    wide = wide.expand(-1, groups) if wide.shape[1] == 1 else wide
    return tuple(part.contiguous() for part in wide.chunk(groups, 1))


def _frozen(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)


def _granularity(group_size: int | None, whole: str) -> str:
    return f"per {whole}" if group_size is None else f"groups of {group_size}"


def _has_int4_mma(index: int) -> bool:
    return torch.cuda.get_device_capability(index) in ((8, 0), (8, 6), (8, 9))
