"""Marks an in-memory model as a quarot model, so that it saves, attends and caches as its configuration says."""

from __future__ import annotations

from typing import Any

from torch import nn

from quarot.architectures import architecture_of, decoder_layers
from quarot.config import QuarotConfig
from quarot.integrations.transformers import generation, saving
from quarot.integrations.transformers.quantizer import QuarotHfQuantizer, forget
from quarot.nn.expert_list import ExpertList
from quarot.nn.kv_format import KVFormat
from quarot.runtime import fused_decoder


def attach(
    model: Any, config: QuarotConfig, *, record: bool = True, quantizer: QuarotHfQuantizer | None = None
) -> None:
    """Record ``config`` on a model whose modules already are what it says.

    Sets ``config.quantization_config`` and the quantizer (so that ``save_pretrained`` writes a checkpoint that loads as
    this very model), makes saving safe, and, where keys or values are quantised, switches to the attention function
    ``"quarot"`` and makes ``generate`` use a :class:`~quarot.nn.quant_kv_cache.QuantKVCache`. Where every layer has
    fused kernels the decoder takes the fused path (:mod:`quarot.runtime.fused_decoder`). May be called again.

    Args:
        model: a transformers causal-LM model of a supported family.
        config: what was done to it.
        record: False leaves a model without online parts as the plain model it is.
        quantizer: the quantizer that loaded the model, if one did.

    Raises:
        ValueError: another method's quantizer holds weights that are not plain tensors.
    """
    architecture = architecture_of(model)
    _release_other_quantizer(model)
    if not record:
        return
    model.config.quantization_config = config
    model.hf_quantizer = quantizer or QuarotHfQuantizer(config, pre_quantized=True)
    quantized = config.rounds_linears
    # The flag makes transformers refuse .half() and .float(); a model that is only rotated may be cast.
    model.is_quantized = quantized
    model.quantization_method = config.quant_method
    saving.install(model)
    layers = [layer for _, layer in decoder_layers(model)]
    formats = [KVFormat.from_config(config, index) for index in range(len(layers))]
    rounds = any(kv_format.quantizes for kv_format in formats)
    for layer, kv_format in zip(layers, formats, strict=True):
        layer.get_submodule(architecture.attention).quarot_kv_format = kv_format if rounds else None  # type: ignore[assignment]
    if rounds:
        model.set_attn_implementation("quarot")
        generation.install(model)
    else:
        _restore_attention(model)
    for module in model.modules():
        if isinstance(module, ExpertList):
            module.settle()
    if quantized:
        fused_decoder.install(model)
    else:
        fused_decoder.uninstall(model)


def detach(model: Any) -> None:
    """Undo :func:`attach`: a plain model again, whatever its modules are."""
    for _, layer in decoder_layers(model):
        layer.get_submodule(architecture_of(model).attention).quarot_kv_format = None  # type: ignore[assignment]
    _restore_attention(model)
    fused_decoder.uninstall(model)
    saving.uninstall(model)
    forget(model)


def _restore_attention(model: Any) -> None:
    generation.uninstall(model)
    if model.config._attn_implementation == "quarot":
        model.set_attn_implementation("sdpa")


def _release_other_quantizer(model: nn.Module) -> None:
    """Drop the quantizer that a GGUF file leaves behind once its weights are plain; refuse any other."""
    other = getattr(model, "hf_quantizer", None)
    if other is None or isinstance(other, QuarotHfQuantizer):
        return
    method = getattr(other.quantization_config, "quant_method", type(other).__name__)
    method = getattr(method, "value", method)
    packed = [n for n, p in model.named_parameters() if not p.is_floating_point() or type(p).__name__ not in _PLAIN]
    if method != "gguf" or packed:
        raise ValueError(
            f"the model is quantised by {method!r}"
            + (f" ({packed[0]} is not a plain tensor)" if packed else "")
            + "; load it in full precision first (GGUF: quantization_config=GgufConfig(dequantize=True))"
        )
    forget(model)


_PLAIN = ("Parameter", "Tensor")
