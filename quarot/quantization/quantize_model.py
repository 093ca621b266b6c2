"""``quantize_model``: a float model in, an integer model out, in place, one decoder layer at a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from quarot.architectures import Architecture, architecture_of
from quarot.calibration.windows import check_token_ids
from quarot.config import QuarotConfig
from quarot.memory import out_of_memory
from quarot.nn.split_experts import merge_experts, split_experts
from quarot.quantization.bit_allocation import with_allocated_bits
from quarot.quantization.gptq_block import forget_rounders
from quarot.quantization.kv_bit_allocation import with_allocated_kv_bits
from quarot.quantization.pipeline import InMemory, needed_windows, quantize_layers, with_findings
from quarot.quantization.presets import with_preset
from quarot.quantization.progress_store import ProgressStore, fingerprint, weights_hash
from quarot.quantization.rollback import Rollback
from quarot.quantization.selection import selected
from quarot.quantization.training import Drawn, learn_rotation, rounds_activations, teach, training_windows, with_clips
from quarot.rotation.checks import check_device, check_finished, check_values
from quarot.writable import check_folder

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
        preset: ``"best"`` or ``"layerwise"`` switches on what lowers the error without any cost at run time
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
    (:mod:`quarot.tuning.tune`), ``layer_steps`` (:mod:`quarot.tuning.layer`) and ``rotation_steps`` (a copy of the
    model in CPU memory). ``w_bits_budget`` needs the whole model on ``device`` for a while. GPTQ follows the data: q,
    k, v; then o on inputs that come from quantised q, k, v; then gate, up; then down. Each sees its input after the
    online rotations. Each expert of a mixture is calibrated on the tokens that are routed to it, and topped up with
    others of its layer where they are few (:mod:`quarot.quantization.expert_moments`); a warning and
    ``starved_experts`` in the configuration say which were.

    Raises:
        NotImplementedError: a family that is not supported, or tuning a mixture of experts.
        ValueError: already quantised, widths or groups that do not fit (naming the layer), no or too little calibration
            text, NaN weights (by name), or a ``resume_dir`` of another run.

    Whatever is raised, running out of memory and an interrupt included, the model is left as it was, and the same call
    may be made again.
    """
    record = architecture_of(model)
    check_finished(model)
    check_device(device)
    config = with_preset(config, preset, fields)
    config = config.replace(rotation=_rotation_of(model, config))
    if resume_dir is not None:
        check_folder(Path(resume_dir), "resume_dir")
    if isinstance(calibration, Iterator):
        calibration = list(calibration)  # it may be drawn from twice
    where = None if device is None else torch.device(device)
    with _experts_split(model, record, config):
        _quantize(model, record, config, calibration, tokenizer, resume_dir, where, progress)
    return model


@contextmanager
def _experts_split(model: Any, record: Architecture, config: QuarotConfig) -> Iterator[None]:
    """Experts as linear layers, from here on where they are quantised; merged again where that fails."""
    selected(model, record, config)  # what it refuses has changed nothing
    check_values(model, offloaded=True)
    try:
        if record.experts is not None and config.rounds_linears:
            split_experts(model)
        yield
    except BaseException:
        with suppress(torch.OutOfMemoryError):  # then they stay split, which computes the same
            merge_experts(model)
        raise


def _quantize(
    model: Any,
    record: Architecture,
    config: QuarotConfig,
    calibration: Any,
    tokenizer: Any,
    resume_dir: str | os.PathLike[str] | None,
    where: torch.device | None,
    progress: bool,
) -> None:
    configs = selected(model, record, config)
    windows = needed_windows(configs, config, calibration, tokenizer)
    if windows is not None:
        check_token_ids(model, windows)
    store = None if resume_dir is None else ProgressStore(resume_dir, fingerprint(weights_hash(model), config, windows))
    rollback = Rollback(model, configs)
    training = model.training
    model.eval()
    try:
        if windows is not None and (config.w_bits_budget or config.finds_kv_bits):
            with _all_on(model, where):
                if config.finds_kv_bits:
                    config = with_allocated_kv_bits(model, config, windows, store, progress)
                if config.w_bits_budget:
                    config = with_allocated_bits(model, record, config, configs, windows, store, progress)
            configs = selected(model, record, config)
        if windows is not None and configs and (config.tune_steps or config.rotation_steps):
            now = config.tune_batch_size, config.calibration_length
            lower = "tune_batch_size (now {}) or calibration_length (now {})".format(*now)
            drawn = training_windows(calibration, tokenizer, config)
            with out_of_memory("training", f"{lower}, or do without (tune_steps=0, rotation_steps=0)"):
                config, clips = _quantize_and_train(
                    model, configs, windows, drawn, store, config, where, progress, rollback
                )
            starved: dict[str, int] = {}
        else:
            place = InMemory(where, rollback)
            clips, _, starved = quantize_layers(
                model, configs, windows if configs else None, config, store, place, progress
            )
    except BaseException:
        rollback.undo()
        raise
    finally:
        model.train(training)
        forget_rounders()
    from quarot.integrations.transformers import attach

    attach(model, with_findings(config, clips, starved))


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


def _quantize_and_train(
    model: Any,
    configs: dict[str, QuarotConfig],
    windows: torch.Tensor,
    drawn: Drawn,
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
    from quarot.tuning.tune import tune

    homes = {parameter.device for parameter in model.parameters()}
    if len(homes) > 1:
        raise ValueError(
            f"training needs the model on one device, not on {sorted(map(str, homes))};"
            " or set tune_steps=0 and rotation_steps=0"
        )
    home = homes.pop()
    try:
        model.to(device or home)
        material = teach(model, drawn, config)
        if config.rotation_steps and rounds_activations(config, configs):
            rollback.keep_weights()
            material, refinement = learn_rotation(model, config, material, store, progress)
            configs = with_clips(model, configs, refinement)
            config = config.replace(rotation=model.quarot_rotation.to_dict())
        clips = {name: chosen.a_clip for name, chosen in configs.items() if chosen.a_bits < 16}
        calibrated = any((c.w_bits < 16 and c.w_method == "gptq") or c.a_clip_search for c in configs.values())
        inputs = windows if calibrated or config.layer_steps else None
        place = InMemory(device, rollback)
        searched, latents, _ = quantize_layers(model, configs, inputs, config, store, place, progress)
        clips |= searched
        if config.tune_steps:
            clips |= tune(model, config, material, latents, progress)
    finally:
        model.to(home)
    return config, clips


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
