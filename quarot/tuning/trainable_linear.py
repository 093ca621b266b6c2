"""``TrainableLinear``: a ``QuantLinear`` whose codes, scales and activation clip can be learned."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from quarot.architectures import Architecture
from quarot.nn.quant_linear import QuantLinear
from quarot.quantization.stages import stages
from quarot.quantization.storage import store
from quarot.tuning.shared_input import SharedInput
from quarot.tuning.straight_through import round_latents


class TrainableLinear(nn.Module):
    """The same integers as its source, as differentiable floats.

    Attributes:
        latent: [N, K] fp32, the weight in units of its scale, so that one learning rate fits all rows; where the weight
            before rounding is not known, the middle of its code's interval.
        log_step: [N, G] fp32, logarithm of the scale in units of the one it starts with.
        clip: scalar, the activation clip ratio; layers that share an input share this parameter.
        shared: quantises the input.
    """

    def __init__(
        self, source: QuantLinear, latent: torch.Tensor | None, shared: SharedInput, clip: nn.Parameter
    ) -> None:
        super().__init__()
        self.source, self.shared, self.clip = source, shared, clip
        self.latent: nn.Parameter | None = None
        if source.w_bits == 16:
            return
        self._half = 2 ** (source.w_bits - 1)
        scale = source.weight_scale.detach().reshape(source.out_features, -1)
        zero = None if source.weight_zero is None else source.weight_zero.detach().reshape(scale.shape)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("zero", zero, persistent=False)
        start = source.codes().float()
        if latent is not None:
            exact = latent.to(start.device).clamp(-self._half - 0.4, self._half - 0.6)
            # Codes are rounded latents, up to fp32; where a tie fell the other way, the code counts.
            start = torch.where(exact.round().clamp(-self._half, self._half - 1) == start, exact, start)
        if zero is not None:
            start = (start.unflatten(-1, (zero.shape[1], -1)) - zero[..., None]).flatten(-2)
        self.latent = nn.Parameter(start)
        self.log_step = nn.Parameter(torch.zeros_like(scale))

    def weight(self) -> torch.Tensor:
        """fp32 [N, K] with gradients."""
        if self.latent is None:
            return self.source.qweight
        # Latents move with the scale, so that its gradient is exact. With latents that stay it is that of a learned
        # step size, which drifts: inside its interval a latent is where the gradient has moved it, the two agree in
        # sign, and training shrinks every scale.
        scale = self.scale * self.log_step.exp()
        codes = round_latents(self.latent.unflatten(-1, (scale.shape[1], -1)), self.zero, self.source.w_bits)
        return (codes * scale[..., None]).flatten(-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        bias = None if self.source.bias is None else self.source.bias.to(x.dtype)
        return F.linear(self.shared(x, self.clip), self.weight().to(x.dtype), bias)

    @torch.no_grad()
    def position(self) -> torch.Tensor:
        """The weight in units of its scale, zeros included, fp32 [N, K]: what :meth:`finish` rounds and clamps."""
        assert self.latent is not None
        if self.zero is None:
            return self.latent.detach()
        return (self.latent.unflatten(-1, (self.scale.shape[1], -1)) + self.zero[..., None]).flatten(-2)

    @torch.no_grad()
    def finish(self) -> QuantLinear:
        """Write what was learned into the source, and return it."""
        source = self.source
        source.a_clip = round(float(self.clip.detach().clamp(0.05, 1.0)), 6)
        if self.latent is not None:
            # Zeros are integers, so that this rounds as in training: rint(x) + zero = rint(x + zero), but for ties.
            codes = self.position().round().clamp_(-self._half, self._half - 1).to(torch.int8)
            source.qweight.data = store(codes, source.w_bits)
            scale = self.scale * self.log_step.exp()
            source.weight_scale.data = scale.reshape(source.weight_scale.shape).contiguous()
        return source


def make_trainable(
    record: Architecture, layer: nn.Module, latents: dict[str, torch.Tensor]
) -> dict[str, TrainableLinear]:
    """Put trainable layers in place of a decoder layer's integer ones.

    Those that share an input share their clip ratio.

    Args:
        record: of the layer's family.
        layer: changed in place.
        latents: by path inside the layer, weights in units of their scale before they were rounded; codes where absent.

    Returns:
        The new layers, by path.
    """
    trainable: dict[str, TrainableLinear] = {}
    for stage in stages(record, layer):
        sources = {path: layer.get_submodule(path) for path in stage}
        integer = {path: s for path, s in sources.items() if isinstance(s, QuantLinear)}
        shared: dict[tuple[int, int | None], tuple[SharedInput, nn.Parameter]] = {}
        for path, source in integer.items():
            key = source.a_bits, source.a_group_size
            readers = sum((s.a_bits, s.a_group_size) == key for s in integer.values())
            if key not in shared:
                clip = nn.Parameter(torch.tensor(source.a_clip, device=source.qweight.device))
                shared[key] = SharedInput(source.input_rotation, *key, readers), clip
            trainable[path] = TrainableLinear(source, latents.get(path), *shared[key])
            layer.set_submodule(path, trainable[path])
    return trainable
