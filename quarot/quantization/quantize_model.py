"""``quantize_model``: a float model in, an integer model out, in place, one decoder layer at a time."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from quarot.architectures import architecture_of, decoder_layers, geometry
from quarot.calibration.decoder import LayerInputs
from quarot.calibration.resampling import resampled_windows
from quarot.calibration.windows import calibration_windows
from quarot.config import QuarotConfig
from quarot.nn.split_experts import split_experts
from quarot.progress import progress_bar
from quarot.quantization.bit_allocation import with_allocated_bits
from quarot.quantization.gptq_block import forget_rounders
from quarot.quantization.head import quantize_head
from quarot.quantization.layer import LayerQuantizer
from quarot.quantization.presets import preset_fields
from quarot.quantization.progress_store import ProgressStore, fingerprint
from quarot.quantization.rollback import Rollback
from quarot.quantization.selection import selected
from quarot.rotation.refinement import Refinement

logger = logging.getLogger("quarot")


def quantize_model(
    model: Any,
    config: QuarotConfig | None = None,
    *,
    tokenizer: Any = None,
    calibration: Any = None,
    preset: str | None = None,
    progress: bool = True,
    resume_dir: str | os.PathLike[str] | None = None,
    device: torch.device | str | None = None,
    **fields: Any,
) -> Any:
    """Quantise a (rotated) causal-LM model in place; the defaults are the paper's W4A4KV4 GPTQ recipe.

    Args:
        model: a transformers model of a supported family, normally after :func:`quarot.rotate_model`.
        config: settings; ``fields`` override single ones of it (``quantize_model(model, w_bits=8, a_bits=8)``).
        preset: ``"best"`` switches on what lowers the error without any cost at run time
            (:data:`quarot.quantization.presets.PRESETS`); ``fields`` come after it.
        tokenizer: for calibration text.
        calibration: text, texts, a path, a ``datasets`` dataset, or token ids
            (:func:`quarot.calibration.windows.calibration_windows`); not needed for RTN.
        progress: show a progress bar.
        resume_dir: keep every finished layer here; after a failure or a kill, the same call on the same model (freshly
            loaded and rotated, or the very object) continues behind the last one.
        device: where decoder layers are worked on, one after the other, e.g. ``"cuda"`` for a model on the CPU; they
            return to where they were. None: wherever they are.

    Returns:
        The same model.

    Memory beyond the model: one set of hidden states (windows x length x hidden, in the model's dtype), the statistics
    of one layer and, in CPU memory, the weights that have been replaced so far; more only with ``tune_steps``
    (:mod:`quarot.tuning.tune`) and ``rotation_steps`` (a copy of the model in CPU memory). ``w_bits_budget`` needs the
    whole model on ``device`` for a while. GPTQ follows the data: q, k,
    v; then o on inputs that come from quantised q, k, v; then gate, up; then down. Each sees its input after the online
    rotations. Each expert of a mixture is calibrated on the tokens that are routed to it, and topped up with others of
    its layer where they are few (:mod:`quarot.quantization.expert_moments`); a warning and ``starved_experts`` in the
    configuration say which were.

    Raises:
        NotImplementedError: a family that is not supported, or tuning a mixture of experts.
        ValueError: already quantised, widths or groups that do not fit (naming the layer), no or too little calibration
            text, NaN weights (naming the layer), or a ``resume_dir`` of another run.

    Whatever is raised, running out of memory and an interrupt included, the model is left as it was (experts perhaps
    split into linear layers that compute the same), and the same call may be made again.
    """
    record = architecture_of(model)
    config = (config or QuarotConfig()).replace(**{**preset_fields(preset), **fields})
    config = config.replace(rotation=_rotation_of(model, config))
    configs = selected(model, record, config)
    if isinstance(calibration, Iterator):
        calibration = list(calibration)  # it may be drawn from twice
    windows = _windows(configs, config, calibration, tokenizer)
    if record.experts is not None:
        split_experts(model)
        configs = selected(model, record, config)
    store = None if resume_dir is None else ProgressStore(resume_dir, fingerprint(model, config, windows))
    where = None if device is None else torch.device(device)
    rollback = Rollback(model, configs)
    training = model.training
    model.eval()
    try:
        if config.w_bits_budget is not None and windows is not None and configs:
            with _all_on(model, where):
                config = with_allocated_bits(model, record, config, configs, windows, store, progress)
            configs = selected(model, record, config)
        if windows is not None and configs and (config.tune_steps or config.rotation_steps):
            samples, length = config.training_samples, config.calibration_length
            material = calibration_windows(calibration, tokenizer, samples=samples, length=length, seed=config.seed + 1)
            config, clips = _quantize_and_train(
                model, configs, windows, material, store, config, where, progress, rollback
            )
            starved: dict[str, int] = {}
        else:
            clips, _, starved = _quantize_layers(model, configs, windows, store, config, where, progress, rollback)
    except BaseException:
        rollback.undo()
        raise
    finally:
        model.train(training)
        forget_rounders()
    overrides = {
        re.escape(name): {**config.overrides.get(re.escape(name), {}), "a_clip": c} for name, c in clips.items()
    }
    config = config.replace(overrides={**config.overrides, **overrides}, starved_experts=starved)
    if starved:
        _tell_starved(starved, config)
    from quarot.integrations.transformers import attach

    attach(model, config)
    return model


@contextmanager
def _all_on(model: Any, device: torch.device | None) -> Iterator[None]:
    """The whole model on ``device`` inside the block; where it is, when None or when it is on several already."""
    homes = {parameter.device for parameter in model.parameters()}
    if device is None or len(homes) > 1:
        yield
        return
    try:
        model.to(device)
        yield
    finally:
        model.to(homes.pop())


def _tell_starved(starved: dict[str, int], config: QuarotConfig) -> None:
    """One warning for all experts that calibration reached too little."""
    names = [f"{name} ({tokens} tokens)" for name, tokens in sorted(starved.items(), key=lambda item: item[1])]
    fallback = "topped up with other tokens of their layer" if config.gptq_expert_tokens else "rounded to nearest"
    logger.warning(
        "GPTQ: calibration routed too few tokens to %d expert projections, which were %s: %s%s",
        len(names),
        fallback,
        ", ".join(names[:_MOST_NAMES]),
        ", ..; all of them are in the configuration's starved_experts" if len(names) > _MOST_NAMES else "",
    )


_MOST_NAMES = 8


class Quantized(NamedTuple):
    """By module name: searched activation clips, weights before rounding, tokens of experts that had too few."""

    clips: dict[str, float]
    latents: dict[str, torch.Tensor]
    starved: dict[str, int]


def _windows(
    configs: dict[str, QuarotConfig], config: QuarotConfig, calibration: Any, tokenizer: Any
) -> torch.Tensor | None:
    """The calibration windows, or None when no layer needs any."""
    needed = {
        "GPTQ": any(c.w_bits < 16 and c.w_method == "gptq" for c in configs.values()),
        "the activation clip search": any(c.a_bits < 16 and c.a_clip_search for c in configs.values()),
        "tuning": bool(config.tune_steps and configs),
        "learning rotations": bool(config.rotation_steps and configs),
        "w_bits_budget": bool(config.w_bits_budget is not None and configs),
    }
    names = [name for name, is_needed in needed.items() if is_needed]
    if not names:
        return None
    if calibration is None:
        raise ValueError(
            f"{' and '.join(names)} need calibration text: pass calibration= (and tokenizer=), or quantise without it"
            f" (w_method='rtn', a_clip_search=False, tune_steps=0, rotation_steps=0, w_bits_budget=None)"
        )
    samples, length = config.calibration_samples, config.calibration_length
    return calibration_windows(calibration, tokenizer, samples=samples, length=length, seed=config.seed)


def _quantize_layers(
    model: Any,
    configs: dict[str, QuarotConfig],
    windows: torch.Tensor | None,
    store: ProgressStore | None,
    config: QuarotConfig,
    device: torch.device | None,
    progress: bool,
    rollback: Rollback,
) -> Quantized:
    """Quantise every layer."""
    record = architecture_of(model)
    inputs = None if windows is None else LayerInputs(model, windows, device)
    reference = inputs.copy() if inputs is not None and config.gptq_asymmetric else None
    clips: dict[str, float] = {}
    latents: dict[str, torch.Tensor] = {}
    starved: dict[str, int] = {}
    layers = list(decoder_layers(model))
    for index, (name, layer) in enumerate(progress_bar(layers, "quantizing", progress, len(layers))):
        prefix = name + "."
        chosen = {full[len(prefix) :]: c for full, c in configs.items() if full.startswith(prefix)}
        home = next(layer.parameters()).device
        try:
            layer.to(device or home)
            work = LayerQuantizer(name, layer, record, chosen, index, inputs, reference)
            finished = None if store is None else store.load(name)
            if finished is not None:
                work.adopt(finished)
            else:
                work.quantize()
                if store is not None:
                    store.save(name, work.finished)
            if index + 1 < len(layers) or record.lm_head in configs:
                work.advance()
            work.install()
            rollback.park(prefix + path for path in chosen)
        finally:
            layer.to(home)
        clips |= {prefix + path: clip for path, clip in work.clips.items()}
        latents |= {prefix + path: latent for path, latent in work.latents.items()}
        starved |= {prefix + path: tokens for path, tokens in work.starved.items()}
    if record.lm_head in configs:
        quantize_head(model, record, configs[record.lm_head], inputs, device)
    return Quantized(clips, latents, starved)


def _quantize_and_train(
    model: Any,
    configs: dict[str, QuarotConfig],
    windows: torch.Tensor,
    material: torch.Tensor,
    store: ProgressStore | None,
    config: QuarotConfig,
    device: torch.device | None,
    progress: bool,
    rollback: Rollback,
) -> tuple[QuarotConfig, dict[str, float]]:
    """Learn the rotation, quantise, and distil from the model as it was; all of it is on ``device`` meanwhile.

    Returns:
        The configuration with the learned rotation, and activation clips by module name.
    """
    from quarot.tuning.tune import final_states, tune

    homes = {parameter.device for parameter in model.parameters()}
    if len(homes) > 1:
        raise ValueError(
            f"training needs the model on one device, not on {sorted(map(str, homes))};"
            " or set tune_steps=0 and rotation_steps=0"
        )
    home = homes.pop()
    try:
        model.to(device or home)
        material = resampled_windows(model, material, config.resampling_rounds, config.seed, config.tune_batch_size)
        targets = final_states(model, material, config.tune_batch_size)
        if config.rotation_steps and _rounds_activations(config, configs):
            rollback.keep_weights()
            residual, refinement = _learn_rotation(model, config, material, targets, store, progress)
            configs = _with_clips(model, configs, refinement)
            targets = (targets.float() @ residual.float()).to(targets.dtype)
            config = config.replace(rotation=model.quarot_rotation.to_dict())
        clips = {name: chosen.a_clip for name, chosen in configs.items() if chosen.a_bits < 16}
        calibrated = any((c.w_bits < 16 and c.w_method == "gptq") or c.a_clip_search for c in configs.values())
        inputs = windows if calibrated else None
        searched, latents, _ = _quantize_layers(model, configs, inputs, store, config, device, progress, rollback)
        clips |= searched
        if config.tune_steps:
            clips |= tune(model, config, material, targets, latents, progress)
    finally:
        model.to(home)
    return config, clips


def _rounds_activations(config: QuarotConfig, configs: dict[str, QuarotConfig]) -> bool:
    """Whether a rotation can learn anything: weights stay as they are meanwhile."""
    return min(config.k_bits, config.v_bits, *(chosen.a_bits for chosen in configs.values())) < 16


def _learn_rotation(
    model: Any,
    config: QuarotConfig,
    windows: torch.Tensor,
    targets: torch.Tensor,
    store: ProgressStore | None,
    progress: bool,
) -> tuple[torch.Tensor, Refinement]:
    """Refine the rotation of the model in place; returns the change of the residual basis, [hidden, hidden]."""
    from quarot.rotation.learned import apply_refinement, learn_refinement

    found = None if store is None else store.load_tensors("rotation")
    if found is not None:
        refinement = Refinement(geometry(model), config.a_clip, targets.device)
        refinement.load_state_dict(found)
    else:
        refinement, _ = learn_refinement(
            model,
            config,
            windows,
            targets,
            steps=config.rotation_steps,
            batch_size=config.tune_batch_size,
            progress=progress,
            seconds=config.tune_seconds,
        )
        if store is not None:
            store.save_tensors("rotation", refinement.state_dict())
    return apply_refinement(model, refinement), refinement


def _with_clips(model: Any, configs: dict[str, QuarotConfig], refinement: Refinement) -> dict[str, QuarotConfig]:
    """The layers' settings with the clip ratios that were learned with the rotation."""
    found = dict(configs)
    for index, (name, _) in enumerate(decoder_layers(model)):
        for slot, projections in architecture_of(model).slots.items():
            for full in (f"{name}.{projection.path}" for projection in projections):
                if full in found and found[full].a_bits < 16:
                    found[full] = found[full].replace(a_clip=refinement.clip(index, slot))
    return found


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
