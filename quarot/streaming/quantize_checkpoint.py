"""``quantize_checkpoint``: from the folder of a model to the folder of a quantised one, whatever the model's size."""

from __future__ import annotations

import copy
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from quarot.architectures import architecture_of, decoder_layers
from quarot.calibration.windows import check_token_ids
from quarot.config import QuarotConfig
from quarot.integrations.seal import seal
from quarot.nn.split_experts import split_experts, split_layer_experts
from quarot.quantization.gptq_block import forget_rounders
from quarot.quantization.pipeline import needed_windows, quantize_layers, with_findings
from quarot.quantization.presets import with_preset
from quarot.quantization.progress_store import FINGERPRINT, fingerprint
from quarot.quantization.selection import selected
from quarot.rotation.checks import check_device, check_unquantized, check_values
from quarot.rotation.planning import SWITCHES
from quarot.rotation.rotate import Rotator
from quarot.streaming.checkpoint import CannotStream, Checkpoint, tied_names
from quarot.streaming.shards import ShardStore
from quarot.writable import check_apart, check_folder

logger = logging.getLogger("quarot")

_WHOLE_MODEL = {
    "tune_steps": "trains",
    "rotation_steps": "trains",
    "w_bits_budget": "measures",
}
"""Settings that no single layer can decide."""

DEFAULT_ROTATION: Mapping[str, Any] = MappingProxyType({})


def quantize_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config: QuarotConfig | None = None,
    *,
    rotation: Mapping[str, Any] | None = DEFAULT_ROTATION,
    tokenizer: Any = None,
    calibration: Any = None,
    preset: str | None = None,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    progress: bool = True,
    **fields: Any,
) -> QuarotConfig:
    """Rotate and quantise a checkpoint layer by layer, with one decoder layer in memory at a time.

    The result equals, bit for bit, that of loading the model onto ``device``, :func:`quarot.rotate_model`,
    :func:`quarot.quantize_model` and ``save_pretrained``: both run :mod:`quarot.quantization.pipeline`. What is in
    memory is one layer, the embedding and the head, and for GPTQ the hidden states of the calibration windows.

    Finished layers are kept beside ``out`` (in ``.NAME.unfinished``): after a kill the same call continues behind the
    last one, and a folder under the name ``out`` is always a whole checkpoint.

    Args:
        path: a folder with safetensors, or a hub repository, of a model of a supported family.
        out: the folder to write; files of an old checkpoint in it are replaced, others stay.
        config, preset, fields, tokenizer, calibration, progress: as in :func:`quarot.quantize_model`; the tokenizer is
            saved with the model.
        rotation: switches of :func:`quarot.rotate_model` (``seed``, ``r1``, ...); None leaves the model unrotated.
        dtype: of unquantised tensors; ``"auto"`` is the checkpoint's.
        device: where layers are worked on; None is the CPU.

    Returns:
        What was done, as ``config.json`` records it.

    Raises:
        CannotStream: it takes the whole model in memory (tuning, learned rotations, budgets of bits, checkpoints that
            are not safetensors or that transformers renames); the message says why. Nothing was written.
        FileExistsError: ``out`` is a file.
        NotImplementedError, ValueError: as the functions above; or an unfinished run with other settings is in the way.
    """
    check_folder(Path(out), "out")
    check_device(device)
    _check_arguments(rotation, tokenizer)
    checkpoint = Checkpoint(path)
    check_apart(checkpoint.folder, Path(out), "out")
    model = checkpoint.empty_model(dtype)
    record = architecture_of(model)
    check_unquantized(model)
    config = with_preset(config, preset, fields)
    _check_streamable(config)
    where = torch.device(device or "cpu")
    rotator = None if rotation is None else Rotator(model, device=where, **rotation)
    if rotator is None:
        logger.warning("the model is not rotated (4-bit activations need it)")
    else:
        config = config.replace(rotation=rotator.plan.to_dict())
    names = [name for name, _ in decoder_layers(model)]
    checkpoint.check_names(model)
    place = _Streamed(checkpoint, model, rotator, where)
    described = copy.deepcopy(model) if record.experts is not None else model  # while nothing is in it
    try:
        place.fill_ends()
        configs = selected(model, record, config, in_memory=False)
        windows = needed_windows(configs, config, calibration, tokenizer)
        if windows is not None:
            check_token_ids(model, windows)
        if described is not model:  # experts are linear layers, with names and settings, once they are split
            split_experts(described)
            configs = selected(described, record, config, in_memory=False)
        work = _unfinished(Path(out))
        identity = fingerprint(f"{checkpoint.fingerprint()} {model.dtype} {_matrix(rotation)}", config, windows)
        place.store = ShardStore(work, names, identity)
        clips, _, starved = quantize_layers(model, configs, windows, config, place.store, place, progress)
    finally:
        forget_rounders()
    config = _as_recorded(with_findings(config, clips, starved))
    place.store.write("", place.ends(), metadata=seal(config))
    place.store.write_index()
    _write_configuration(model, config, work)
    if tokenizer is not None:
        tokenizer.save_pretrained(work)
    _finish(work, Path(out))
    return config


class _Streamed:
    """Layers of a checkpoint: each is read, rotated, worked on, written and dropped (a ``Place`` of the pipeline)."""

    store: ShardStore

    def __init__(self, checkpoint: Checkpoint, model: Any, rotator: Rotator | None, device: torch.device) -> None:
        self.checkpoint, self.model, self.rotator, self.device = checkpoint, model, rotator, device

    def needs(self, name: str, calibrated: bool) -> bool:
        """A finished layer only when hidden states have to pass through it."""
        return calibrated or not self.store.has(name)

    @contextmanager
    def at_work(self, name: str, layer: nn.Module, paths: Sequence[str]) -> Iterator[None]:
        """See :class:`quarot.quantization.pipeline.Place`."""
        prefix = name + "."
        try:
            self.checkpoint.fill(self.model, [prefix + own for own in _parameters(layer)], self.device)
            check_values(layer, name)
            if self.rotator is not None:
                self.rotator.rotate_layer(layer)
            if paths:
                split_layer_experts(layer, architecture_of(self.model))
            yield
            if not self.store.has(name):
                self.store.write(name, {prefix + key: tensor for key, tensor in layer.state_dict().items()}, layer)
        finally:
            layer.to("meta")

    def fill_ends(self) -> None:
        """Read, check and rotate what is not in a decoder layer: embedding, final norm, head."""
        model = self.model
        layers, tied = architecture_of(model).layers + ".", tied_names(model)
        ends = [name for name in _parameters(model) if not name.startswith(layers) and name not in tied]
        self.checkpoint.fill(model, ends, self.device)
        if tied:
            model.tie_weights()
        for name in ends:
            check_values(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[0])
        if self.rotator is not None:
            self.rotator.rotate_ends()

    def ends(self) -> dict[str, torch.Tensor]:
        """What :meth:`fill_ends` read and the pipeline may have changed, by name; tied weights once."""
        layers, tied = architecture_of(self.model).layers + ".", tied_names(self.model)
        return {k: v for k, v in self.model.state_dict().items() if not k.startswith(layers) and k not in tied}


def _check_arguments(rotation: Any, tokenizer: Any) -> None:
    """What would only be noticed deep inside, or when all is done."""
    if rotation is not None and not (isinstance(rotation, Mapping) and set(rotation) <= set(SWITCHES)):
        raise ValueError(f"rotation={rotation!r} must be a dict with some of {list(SWITCHES)}, or None for no rotation")
    if tokenizer is not None and not callable(getattr(tokenizer, "save_pretrained", None)):
        raise ValueError(f"tokenizer={tokenizer!r} has no save_pretrained: pass the tokenizer itself, or None")


def _check_streamable(config: QuarotConfig) -> None:
    for name, why in _WHOLE_MODEL.items():
        if getattr(config, name):
            raise CannotStream(f"{name}={getattr(config, name)} {why} the whole model")
    if config.finds_kv_bits:
        raise CannotStream(f"kv_bits_budget={config.kv_bits_budget} measures the whole model")


def _parameters(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(remove_duplicate=False)]


def _matrix(rotation: Mapping[str, Any] | None) -> str:
    """A hash of the rotation matrix a caller gave, which the plan does not hold."""
    given = (rotation or {}).get("r1")
    if not isinstance(given, torch.Tensor):
        return ""
    return hashlib.sha256(given.detach().double().cpu().contiguous().numpy().tobytes()).hexdigest()


def _as_recorded(config: QuarotConfig) -> QuarotConfig:
    """As ``rotate_model`` records a model that nothing quantises."""
    if config.rounds_linears or config.rounds_cache:
        return config
    return QuarotConfig(w_bits=16, a_bits=16, k_bits=16, v_bits=16, rotation=config.rotation)


def _write_configuration(model: Any, config: QuarotConfig, folder: Path) -> None:
    from quarot.integrations.transformers.card import write_readme

    model.config.quantization_config = config
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    write_readme(folder, folder)
    model.config.save_pretrained(folder)


def _unfinished(target: Path) -> Path:
    """Where the shards grow: inside a target that exists, whose parent may be another file system; else beside it."""
    target = target.absolute()
    name = f".{target.name}.unfinished"
    if (target / name).exists() or (target.exists() and not (target.parent / name).exists()):
        return target / name
    return target.parent / name


def _finish(work: Path, target: Path) -> None:
    from quarot.integrations.transformers.saving import move_into_place, sync

    sync(work)
    # The fingerprint leaves last: a kill in between must not leave shards that any run would take for its own.
    move_into_place(work, target.absolute(), behind=FINGERPRINT)
