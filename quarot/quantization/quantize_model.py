"""``quantize_model``: a float model in, an integer model out, in place, one decoder layer at a time."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

import torch
from torch import nn

from quarot.architectures import Architecture, architecture_of, decoder_layers, linear_modules
from quarot.calibration.decoder import LayerInputs
from quarot.calibration.moments import Moments
from quarot.calibration.windows import calibration_windows
from quarot.config import QuarotConfig
from quarot.nn.quant_linear import QuantLinear, linear_weight
from quarot.nn.rotated_linear import RotatedLinear
from quarot.progress import progress_bar
from quarot.quantization.fit import check_fits
from quarot.quantization.gptq import check_finite, quantize_gptq
from quarot.quantization.layer import LayerQuantizer
from quarot.quantization.progress_store import ProgressStore, fingerprint
from quarot.quantization.rtn import quantize_rtn

logger = logging.getLogger("quarot")


def quantize_model(
    model: Any,
    config: QuarotConfig | None = None,
    *,
    tokenizer: Any = None,
    calibration: Any = None,
    progress: bool = True,
    resume_dir: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    **fields: Any,
) -> Any:
    """Quantise a (rotated) causal-LM model in place; the defaults are the paper's W4A4KV4 GPTQ recipe.

    Args:
        model: a transformers model of a supported family, normally after :func:`quarot.rotate_model`.
        config: settings; ``fields`` override single ones of it (``quantize_model(model, w_bits=8, a_bits=8)``).
        tokenizer: for calibration text.
        calibration: text, texts, a path, a ``datasets`` dataset, or token ids
            (:func:`quarot.calibration.windows.calibration_windows`); not needed for RTN.
        progress: show a progress bar.
        resume_dir: keep every finished layer here; when killed, the same call on the same (freshly loaded and rotated)
            model continues behind the last one.
        device: where decoder layers are worked on, one after the other, e.g. ``"cuda"`` for a model on the CPU; they
            return to where they were. None: wherever they are.

    Returns:
        The same model.

    Memory beyond the model: one set of hidden states (windows x length x hidden, in the model's dtype) and the
    statistics of one layer. GPTQ follows the data: q, k, v; then o on inputs that come from quantised q, k, v; then
    gate, up; then down. Each sees its input after the online rotations.

    Raises:
        NotImplementedError: a family that is not supported, or experts.
        ValueError: already quantised, widths or groups that do not fit (naming the layer), no or too little calibration
            text, NaN weights (naming the layer), or a ``resume_dir`` of another run. The model is untouched in all but
            the NaN case.
    """
    record = architecture_of(model)
    config = (config or QuarotConfig()).replace(**fields)
    config = config.replace(rotation=_rotation_of(model, config))
    configs = _configs(model, record, config)
    gptq = [name for name, c in configs.items() if c.w_bits < 16 and c.w_method == "gptq"]
    calibrated = gptq or [name for name, c in configs.items() if c.a_bits < 16 and c.a_clip_search]
    windows = None
    if calibrated:
        if calibration is None:
            raise ValueError(
                "GPTQ and activation clip search need calibration text: pass calibration= (and tokenizer=),"
                " or quantise without it (w_method='rtn')"
            )
        samples, length = config.calibration_samples, config.calibration_length
        windows = calibration_windows(calibration, tokenizer, samples=samples, length=length, seed=config.seed)
    store = None if resume_dir is None else ProgressStore(resume_dir, fingerprint(model, config, windows))
    training = model.training
    model.eval()
    where = None if device is None else torch.device(device)
    clips = _quantize_layers(model, record, configs, windows, store, config, where, progress)
    model.train(training)
    for name, clip in clips.items():
        config = config.replace(overrides={**config.overrides, re.escape(name): _override(config, name, clip)})
    from quarot.integrations.transformers import attach

    attach(model, config)
    return model


def _quantize_layers(
    model: Any,
    record: Architecture,
    configs: dict[str, QuarotConfig],
    windows: torch.Tensor | None,
    store: ProgressStore | None,
    config: QuarotConfig,
    device: torch.device | None,
    progress: bool,
) -> dict[str, float]:
    """Quantise every layer; returns the activation clips that were searched, by module name."""
    inputs = None if windows is None else LayerInputs(model, windows, device)
    asymmetric = inputs is not None and config.gptq_asymmetric
    reference = inputs.copy() if inputs is not None and asymmetric else None
    clips: dict[str, float] = {}
    layers = list(decoder_layers(model))
    for index, (name, layer) in enumerate(progress_bar(layers, "quantizing", progress, len(layers))):
        prefix = name + "."
        chosen = {full[len(prefix) :]: c for full, c in configs.items() if full.startswith(prefix)}
        home = next(layer.parameters()).device
        layer.to(device or home)
        work = LayerQuantizer(name, layer, record, chosen, index, inputs, reference)
        found = None if store is None else store.load(name)
        if found is not None:
            work.adopt(*found)
        else:
            work.quantize()
            if store is not None:
                store.save(name, work.results, work.clips)
        if index + 1 < len(layers) or record.lm_head in configs:
            work.advance()
        work.install()
        layer.to(home)
        clips.update({prefix + path: clip for path, clip in work.clips.items()})
    if record.lm_head in configs:
        _quantize_head(model, record, configs[record.lm_head], inputs, device)
    return clips


def _quantize_head(
    model: Any, record: Architecture, config: QuarotConfig, inputs: LayerInputs | None, device: torch.device | None
) -> None:
    """Quantise ``lm_head`` on the output of the final norm."""
    head = model.get_submodule(record.lm_head)
    weight = linear_weight(head).detach()
    check_finite(weight, None, record.lm_head)
    grid: dict[str, Any] = {"symmetric": config.w_symmetric, "group_size": config.w_group_size, "search": config.w_clip}
    parts: Any = (None, None, None)
    if config.w_bits < 16 and config.w_method == "gptq" and inputs is not None:
        moments, norm = Moments(), model.get_submodule(record.final_norm)
        for hidden in inputs.steps:
            with torch.no_grad():
                moments.add(norm(hidden.to(next(norm.parameters()).device)))
        hessian = moments.hessian.to(device or weight.device)
        weight = weight.to(hessian.device)
        parts = quantize_gptq(weight, hessian, config.w_bits, **grid, damping=config.gptq_damping, name=record.lm_head)
    elif config.w_bits < 16:
        parts = quantize_rtn(weight.to(device or weight.device), config.w_bits, **grid)
    model.set_submodule(record.lm_head, QuantLinear.from_linear(head, config, *parts))


def _configs(model: nn.Module, record: Architecture, config: QuarotConfig) -> dict[str, QuarotConfig]:
    """The settings of every linear layer that is to be quantised, by name; all checks that need no data."""
    if record.experts is not None:
        raise NotImplementedError(f"{record.family}: experts cannot be quantised yet; dense models of this library can")
    configs = {}
    for name, module, _ in linear_modules(model):
        if isinstance(module, QuantLinear):
            raise ValueError(f"{name} is quantised already; quantize_model needs the full-precision model")
        chosen = config.for_module(name)
        if config.ignores(name) or chosen.w_bits == chosen.a_bits == 16:
            continue
        if not isinstance(module, (nn.Linear, RotatedLinear)):
            raise ValueError(
                f"{name} is a {type(module).__name__}, which cannot be quantised; load the model unquantised"
            )
        weight = linear_weight(module)
        if weight.is_meta:
            raise ValueError(
                f"{name} is offloaded (a meta tensor); load the model without disk or CPU offload, and use device="
            )
        check_fits(name, weight.shape[1], chosen)
        configs[name] = chosen
    if record.lm_head in configs and _is_tied(model, record):
        raise ValueError(
            f"{record.lm_head} shares its weight with the embedding; rotate_model unties them, or ignore it"
        )
    return configs


def _is_tied(model: nn.Module, record: Architecture) -> bool:
    embedding, head = model.get_submodule(record.embed), model.get_submodule(record.lm_head)
    return linear_weight(head) is linear_weight(embedding)


def _rotation_of(model: Any, config: QuarotConfig) -> dict[str, Any] | None:
    """The rotation plan recorded on the model."""
    recorded = getattr(model.config, "quantization_config", None)
    if isinstance(recorded, dict):
        recorded = QuarotConfig.from_dict(recorded) if recorded.get("quant_method") == "quarot" else None
    if isinstance(recorded, QuarotConfig) and recorded.rotation is not None:
        return recorded.rotation
    if config.rotation is None:
        logger.warning("the model is not rotated: call quarot.rotate_model first (4-bit activations need it)")
    return config.rotation


def _override(config: QuarotConfig, name: str, clip: float) -> dict[str, Any]:
    """What the module's overrides are once its searched clip is added (a later entry of ``overrides`` wins)."""
    return {**config.overrides.get(re.escape(name), {}), "a_clip": clip}
