"""Quantising the linear layers of one decoder layer, stage by stage (paper, section 4, stage 2a, and section 5)."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn

from quarot.architectures import Architecture
from quarot.calibration.activation_clip import search_activation_clip
from quarot.calibration.decoder import LayerInputs
from quarot.calibration.moments import Moments
from quarot.calibration.observed_linear import ObservedLinear
from quarot.config import QuarotConfig
from quarot.nn.expert_list import ExpertList
from quarot.nn.quant_linear import QuantLinear, linear_weight
from quarot.quantization.expert_moments import chunks, routed_moments, top_up
from quarot.quantization.gptq import check_finite, gptq_options, quantize_gptq
from quarot.quantization.grid import QuantizedWeight, grid_options
from quarot.quantization.progress_store import FinishedLayer
from quarot.quantization.rtn import positions, quantize_rtn
from quarot.quantization.stages import Stage, expert_stages, has_experts, same_grid, stages
from quarot.quantization.target import target_weight

_CLIP_SEARCH_STEPS = 4


class _Reached(Exception):
    """Ends a forward pass once the input that was wanted is there."""


class LayerQuantizer:
    """One decoder layer on its way from float to integer.

    Args:
        name: of the layer in the model, for messages.
        layer: changed in place: linear layers become :class:`ObservedLinear` for the time being, then ``QuantLinear``.
        configs: by path inside the layer, of the linear layers to quantise.
        index: of the layer, for ``inputs``.
        inputs: hidden states in front of the layer; None when nothing needs calibration (RTN).
        reference: hidden states of the unquantised model, for asymmetric calibration; None without. Experts are
            calibrated without it: the unquantised model sends other tokens to them.

    Attributes:
        starved: how many tokens calibration routed to each expert projection that needed tokens of other experts.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        record: Architecture,
        configs: dict[str, QuarotConfig],
        index: int,
        inputs: LayerInputs | None,
        reference: LayerInputs | None = None,
    ) -> None:
        self.name, self.layer, self.record, self.index = name, layer, record, index
        self.configs = configs
        self.inputs, self.reference = inputs, reference
        self._reference_is_behind = False
        self.results: dict[str, QuantizedWeight] = {}
        self.clips: dict[str, float] = {}
        self.latents: dict[str, torch.Tensor] = {}
        self.biases: dict[str, torch.Tensor] = {}
        self.starved: dict[str, int] = {}
        for path in configs:
            check_finite(linear_weight(layer.get_submodule(path)), None, f"{name}.{path}")
        self.original = copy.deepcopy(layer) if reference is not None else None
        self.observed = _observe(layer, configs, quantized_inputs=True)
        self._teachers = {} if self.original is None else _observe(self.original, configs, quantized_inputs=False)

    def quantize(self) -> None:
        """Quantise every stage; the later ones see the earlier ones quantised."""
        for stage in stages(self.record, self.layer):
            chosen = tuple(path for path in stage if path in self.configs)
            if not chosen:
                continue
            if any(self.configs[path].a_clip_search and self.configs[path].a_bits < 16 for path in chosen):
                self._choose_clip(chosen)
            weighted = tuple(path for path in chosen if self.configs[path].w_bits < 16)
            moments = self._moments(weighted) if any(self.configs[p].w_method == "gptq" for p in weighted) else None
            for part in same_grid(weighted, self.configs):
                self._quantize_part(part, moments)
        for stage in expert_stages(self.record, self.layer):
            self._quantize_experts(tuple(p for p in stage if p in self.configs and self.configs[p].w_bits < 16))

    def adopt(self, finished: FinishedLayer) -> None:
        """Take the codes of an interrupted run instead of computing them."""
        for path, clip in finished.clips.items():
            self._set_clip(path, clip)
        for path, result in finished.results.items():
            device = self.observed[path].matrix.device
            self._finish(path, QuantizedWeight(*(None if t is None else t.to(device) for t in result)))
        for path, bias in finished.biases.items():
            self._set_bias(path, bias.to(self.observed[path].matrix.device))
        self.latents = finished.latents
        self.starved = finished.starved

    @property
    def finished(self) -> FinishedLayer:
        """What a later run would need."""
        return FinishedLayer(self.results, self.clips, self.latents, self.biases, self.starved)

    def advance(self) -> None:
        """Move the hidden states behind this layer."""
        if self.inputs is not None:
            self.inputs.advance(self.index, self.layer)
        self.advance_reference()

    def advance_reference(self) -> None:
        """Move the hidden states of the full-precision model behind this layer, once."""
        if self.reference is not None and self.original is not None and not self._reference_is_behind:
            self.reference.advance(self.index, self.original)
            self._reference_is_behind = True

    def install(self) -> None:
        """Put the integer layers in place."""
        for path, observed in self.observed.items():
            result = self.results.get(path)
            parts = (None, None, None) if result is None else result
            self.layer.set_submodule(path, QuantLinear.from_linear(observed.source, self.configs[path], *parts))

    def learn(self, trained: dict[str, QuantLinear], latents: dict[str, torch.Tensor]) -> None:
        """Take the codes, scales and clip ratios of trained layers, and put the stand-ins back in place.

        Args:
            trained: by path.
            latents: the weights that these codes were rounded from, in units of their scales, where they are needed.
        """
        for path, layer in trained.items():
            self.layer.set_submodule(path, self.observed[path])
            if layer.a_bits < 16:
                self._set_clip(path, layer.a_clip)
            if layer.w_bits < 16:
                scale = layer.weight_scale.detach().reshape(self.results[path].scale.shape)
                self._finish(path, self.results[path]._replace(codes=layer.codes(), scale=scale))
        self.latents = latents

    def _quantize_experts(self, stage: Stage) -> None:
        """One projection of every expert, each from the tokens that it sees (:mod:`.expert_moments`)."""
        calibrated = {path: self.observed[path] for path in stage if self.configs[path].w_method == "gptq"}
        for path in stage:
            if path not in calibrated:
                self._quantize_part((path,), None)
        for part in chunks(calibrated):
            moments = routed_moments(part, self._windows)
            experts = self.layer.get_submodule(next(iter(part)).rpartition(".")[0].rpartition(".")[0])
            assert isinstance(experts, ExpertList)
            factor = self.configs[next(iter(part))].gptq_expert_tokens
            self.starved |= top_up(experts, part, moments, factor, self._windows)
            for path in part:
                self._quantize_part((path,), moments[path] if moments[path].tokens else None)

    def _windows(self) -> Iterator[None]:
        """Send the calibration windows through the layer as it is now."""
        assert self.inputs is not None
        for hidden in self.inputs.steps:
            self.inputs.run(self.index, self.layer, hidden)
            yield

    def _quantize_part(self, part: Stage, moments: Moments | None) -> None:
        """Round the weights of some layers below each other; without moments to nearest, whatever the method."""
        config = self.configs[part[0]]
        weights = [linear_weight(self.observed[path].source).detach() for path in part]
        weight = torch.cat([w.float() for w in weights])
        latent = torch.empty_like(weight) if self._trains(config) else None
        if moments is None or config.w_method == "rtn":
            nearest = config.replace(w_method="rtn")  # an expert that no token is routed to, with its default exponent
            result = quantize_rtn(weight, nearest.w_bits, **grid_options(nearest))
            if latent is not None:
                latent.copy_(positions(weight, result))
        else:
            result = self._by_gptq(part, weight, moments, latent)
        rows = [w.shape[0] for w in weights]
        split = [(None,) * len(part) if tensor is None else tensor.split(rows) for tensor in (*result, latent)]
        for path, codes, scale, zero, before in zip(part, *split, strict=True):
            self._finish(path, QuantizedWeight(codes, scale, zero))
            if before is not None:
                self.latents[path] = before

    def _by_gptq(
        self, part: Stage, weight: torch.Tensor, moments: Moments, latent: torch.Tensor | None
    ) -> QuantizedWeight:
        """GPTQ on the stacked weight fp32 [N, K] of some layers, and their corrected biases."""
        config, original = self.configs[part[0]], weight
        if "input" in moments.targets:
            residual = moments.cross("residual") if part[0] in self._writers else None
            weight = target_weight(weight, moments.hessian, moments.cross("input"), residual, config.gptq_damping)
        name = ", ".join(f"{self.name}.{path}" for path in part)
        options = gptq_options(config)
        result = quantize_gptq(weight, moments.hessian, config.w_bits, **options, latent=latent, name=name)
        if config.gptq_bias_correction and any(self.observed[path].source.bias is not None for path in part):
            wanted = original @ moments.mean("input" if "input" in moments.targets else "x")
            self._shift_biases(part, wanted - result.dequantize() @ moments.mean())
        return result

    def _shift_biases(self, part: Stage, shift: torch.Tensor) -> None:
        """Add the mean error of the outputs to the biases; layers without one stay without."""
        sources = [self.observed[path].source for path in part]
        rows = [linear_weight(source).shape[0] for source in sources]
        for path, source, change in zip(part, sources, shift.split(rows), strict=True):
            if isinstance(source.bias, torch.Tensor):
                self._set_bias(path, (source.bias.detach().float() + change).to(source.bias.dtype))

    def _set_bias(self, path: str, bias: torch.Tensor) -> None:
        self.biases[path] = bias
        self.observed[path].source.bias = nn.Parameter(bias, requires_grad=False)

    def _finish(self, path: str, result: QuantizedWeight) -> None:
        observed = self.observed[path]
        self.results[path] = result
        observed.matrix = result.dequantize().to(observed.matrix.dtype)

    def _trains(self, config: QuarotConfig) -> bool:
        """Whether training follows, which starts from the weights before rounding."""
        return config.tune_steps > 0 or (config.layer_steps > 0 and not has_experts(self.record, self.layer))

    @property
    def _writers(self) -> tuple[str, str]:
        return self.record.attn_out.path, self.record.mlp_out.path

    def _choose_clip(self, stage: Stage) -> None:
        assert self.inputs is not None
        first = self.observed[stage[0]]
        before, first.quantized_inputs = first.quantized_inputs, False
        steps = self.inputs.steps[:: max(1, len(self.inputs.steps) // _CLIP_SEARCH_STEPS)]
        x = torch.cat([_input_of(self.inputs, self.index, self.layer, first, h)[0].flatten(0, -2) for h in steps])
        first.quantized_inputs = before
        weight = torch.cat([linear_weight(self.observed[path].source).detach() for path in stage])
        config = self.configs[stage[0]]
        clip = search_activation_clip(x, weight, config.a_bits, config.a_group_size)
        for path in stage:
            self._set_clip(path, clip)

    def _set_clip(self, path: str, clip: float) -> None:
        self.clips[path] = clip
        self.configs[path] = self.observed[path].config = self.configs[path].replace(a_clip=clip)

    def _moments(self, stage: Stage) -> Moments:
        assert self.inputs is not None
        moments = Moments()
        path = stage[0]
        writes = path in self._writers
        for step, hidden in enumerate(self.inputs.steps):
            watched = self._stream(self.layer, path)
            x, stream = _input_of(self.inputs, self.index, self.layer, self.observed[path], hidden, watched)
            weight, targets = None, {}
            if self.configs[path].gptq_asymmetric and self.reference is not None and self.original is not None:
                teacher, hidden = self._teachers[path], self.reference.steps[step]
                watched = self._stream(self.original, path)
                targets["input"], clean = _input_of(self.reference, self.index, self.original, teacher, hidden, watched)
                if writes:
                    scale = getattr(self.layer, "residual_multiplier", 1.0)  # Granite scales what it adds
                    targets["residual"] = (clean.float() - stream.float()) / scale
            if writes and self.configs[path].gptq_relative_error:
                # The next norm divides the stream by its size, so an error counts relative to that.
                weight = stream.float().square().mean(-1, keepdim=True).clamp_min(1e-12).reciprocal()
            moments.add(x, weight, **targets)
        return moments

    def _stream(self, layer: nn.Module, path: str) -> nn.Module:
        """The norm whose input is the residual stream that the output of ``path`` is added to."""
        return layer.get_submodule(self.record.mlp_norm if path == self.record.mlp_out.path else self.record.attn_norm)


def _observe(layer: nn.Module, configs: dict[str, QuarotConfig], quantized_inputs: bool) -> dict[str, ObservedLinear]:
    observed = {}
    for path, config in configs.items():
        source = layer.get_submodule(path)
        observed[path] = ObservedLinear(source, config, quantized_inputs and config.gptq_quantized_inputs)
        layer.set_submodule(path, observed[path])
    return observed


def _input_of(
    inputs: LayerInputs,
    index: int,
    layer: nn.Module,
    linear: ObservedLinear,
    hidden: torch.Tensor,
    stream: nn.Module | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``linear`` and the norm ``stream`` are given when ``hidden`` passes through the layer."""
    seen: list[torch.Tensor] = []
    passed: list[torch.Tensor] = [hidden]

    def reached(x: torch.Tensor) -> None:
        seen.append(x)
        raise _Reached

    handle = None if stream is None else stream.register_forward_pre_hook(lambda _, args: passed.append(args[0]))
    linear.observer = reached
    try:
        inputs.run(index, layer, hidden)
    except _Reached:
        pass
    finally:
        linear.observer = None
        if handle is not None:
            handle.remove()
    return seen[0], passed[-1]
