"""``TrainableLinear``: a ``QuantLinear`` whose codes, scales and activation clip can be learned."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from quarot.nn.quant_linear import QuantLinear
from quarot.quantization.storage import store
from quarot.tuning.straight_through import quantize_activations, quantize_weights
from quarot.tuning.transform import transform


class TrainableLinear(nn.Module):
    """The same integers as its source, as differentiable floats.

    Attributes:
        latent: [N, K] fp32, rounds to the codes; in units of the scale, so that one learning rate fits all rows.
        log_scale: [N, G] fp32, what the scales are multiplied by, as a logarithm.
        clip: scalar, the activation clip ratio; layers that share an input share this parameter.
    """

    def __init__(self, source: QuantLinear, latent: torch.Tensor | None, clip: nn.Parameter) -> None:
        super().__init__()
        self.source = source
        self.clip = clip
        self.latent: nn.Parameter | None = None
        if source.w_bits == 16:
            return
        half = 2 ** (source.w_bits - 1)
        codes = source.codes().float()
        start = codes if latent is None else latent.to(codes.device).clamp(-half - 0.4, half - 1 + 0.4)
        # GPTQ's codes are its latents rounded, up to fp32; where a tie fell the other way, the code counts.
        start = torch.where(start.round().clamp(-half, half - 1) == codes, start, codes)
        self.latent = nn.Parameter(start)
        scale = source.weight_scale.detach().reshape(source.out_features, -1)
        self.register_buffer("scale", scale, persistent=False)
        self.log_scale = nn.Parameter(torch.zeros_like(scale))

    def weight(self) -> torch.Tensor:
        """fp32 [N, K] with gradients."""
        if self.latent is None:
            return self.source.qweight
        zero = self.source.weight_zero
        zero = None if zero is None else zero.detach().reshape(self.scale.shape)
        return quantize_weights(self.latent, self.scale * self.log_scale.exp(), zero, self.source.w_bits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        source = self.source
        x = quantize_activations(transform(x, source.input_rotation), source.a_bits, self.clip, source.a_group_size)
        return F.linear(x, self.weight().to(x.dtype), None if source.bias is None else source.bias.to(x.dtype))

    @torch.no_grad()
    def finish(self) -> QuantLinear:
        """Write what was learned into the source, and return it."""
        source = self.source
        source.a_clip = round(float(self.clip.clamp(0.05, 1.0)), 6)
        if self.latent is not None:
            half = 2 ** (source.w_bits - 1)
            codes = self.latent.round().clamp_(-half, half - 1).to(torch.int8)
            scale = (self.scale * self.log_scale.exp()).reshape(source.weight_scale.shape)
            source.qweight.data = store(codes, source.w_bits)
            source.weight_scale.data = scale.contiguous()
        return source
