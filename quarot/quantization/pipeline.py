"""The layer-by-layer pipeline behind ``quantize_model`` (a model in memory) and ``quantize_checkpoint`` (one on disk).

Both quantise the same decoder layers in the same order from the same hidden states; they differ in where a layer is
while it is not worked on, and that is all a :class:`Place` says. So their results are equal bit for bit.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from quarot.architectures import Architecture, architecture_of, decoder_layers
from quarot.calibration.decoder import LayerInputs
from quarot.calibration.windows import calibration_windows
from quarot.config import QuarotConfig
from quarot.current_device import current
from quarot.integrations.transformers.plain_attention import fused_float32_attention
from quarot.memory import out_of_memory
from quarot.progress import progress_bar
from quarot.quantization.head import quantize_head
from quarot.quantization.layer import LayerQuantizer
from quarot.quantization.progress_store import FinishedLayer
from quarot.quantization.rollback import Rollback
from quarot.quantization.selection import tell_unused
from quarot.quantization.stages import has_experts

logger = logging.getLogger("quarot")

_MOST_NAMES = 8


class Store(Protocol):
    """Where finished layers survive a kill."""

    def load(self, name: str) -> FinishedLayer | None:
        """The layer of that name, or None when it is not finished."""
        ...

    def save(self, name: str, layer: FinishedLayer) -> None:
        """Keep one finished layer."""
        ...


class Place(Protocol):
    """Where decoder layers are while they are not worked on, and how they come to the device and leave it."""

    device: torch.device | None

    def needs(self, name: str, calibrated: bool) -> bool:
        """Whether a layer must be visited at all; ``calibrated`` says that hidden states have to pass through it."""
        ...

    def at_work(self, name: str, layer: nn.Module, paths: Sequence[str]) -> AbstractContextManager[None]:
        """The layer on the device inside the block, its linear layers at ``paths`` replaced when it ends."""
        ...


class InMemory:
    """Layers of a model in memory: each visits ``device`` (None: stays) and goes home; nothing is lost on failure."""

    def __init__(self, device: torch.device | None, rollback: Rollback) -> None:
        self.device, self.rollback = device, rollback

    def needs(self, name: str, calibrated: bool) -> bool:
        """Every layer: it has to become integers in place."""
        return True

    @contextmanager
    def at_work(self, name: str, layer: nn.Module, paths: Sequence[str]) -> Iterator[None]:
        """See :class:`Place`."""
        home = next(layer.parameters()).device
        try:
            layer.to(self.device or home)
            yield
            self.rollback.park(f"{name}.{path}" for path in paths)
        finally:
            layer.to(home)


class Quantized(NamedTuple):
    """By module name: activation clips that were found, weights before rounding, tokens of experts that had too few."""

    clips: dict[str, float]
    latents: dict[str, torch.Tensor]
    starved: dict[str, int]


def needed_windows(
    configs: dict[str, QuarotConfig], config: QuarotConfig, calibration: Any, tokenizer: Any
) -> torch.Tensor | None:
    """The calibration windows int64 [samples, length], or None when no layer needs any.

    Raises:
        ValueError: they are needed and there is no calibration text.
    """
    needed = {
        "GPTQ": any(c.w_bits < 16 and c.w_method == "gptq" for c in configs.values()),
        "the activation clip search": any(c.a_bits < 16 and c.a_clip_search for c in configs.values()),
        "tuning": bool(config.tune_steps and configs),
        "training layers": bool(config.layer_steps and configs),
        "learning rotations": bool(config.rotation_steps and configs),
        "w_bits_budget": bool(config.w_bits_budget),
        "kv_bits_budget": config.finds_kv_bits,
    }
    names = [name for name, is_needed in needed.items() if is_needed]
    if not names:
        return None
    if calibration is None:
        raise ValueError(
            f"calibration text is needed for {', '.join(names)}: pass calibration= (and tokenizer=), or quantise"
            f" without it (w_method='rtn', a_clip_search=False, tune_steps=0, layer_steps=0, rotation_steps=0, no"
            " budgets)"
        )
    samples, length = config.calibration_samples, config.calibration_length
    return calibration_windows(calibration, tokenizer, samples=samples, length=length, seed=config.seed)


def quantize_layers(
    model: Any,
    configs: dict[str, QuarotConfig],
    windows: torch.Tensor | None,
    config: QuarotConfig,
    store: Store | None,
    place: Place,
    progress: bool,
) -> Quantized:
    """Quantise every layer, and the head where it is among ``configs``."""
    record = architecture_of(model)
    tell_unused(model, record, configs, config)
    with fused_float32_attention(model):
        inputs = None if windows is None else LayerInputs(model, windows, place.device)
        layers = list(decoder_layers(model))
        trained = _to_train(record, layers, config)
        upstream = config.gptq_asymmetric or trained
        reference = inputs.copy() if inputs is not None and upstream else None
        found = Quantized({}, {}, {})
        for index, (name, layer) in enumerate(progress_bar(layers, "quantizing", progress, len(layers))):
            if not place.needs(name, inputs is not None):
                continue
            prefix = name + "."
            chosen = {full[len(prefix) :]: c for full, c in configs.items() if full.startswith(prefix)}
            with ExitStack() as stack:
                stack.enter_context(out_of_memory(f"quantising {name}", _lower(config)))
                stack.enter_context(place.at_work(name, layer, tuple(chosen)))
                stack.enter_context(current(next(layer.parameters()).device))
                work = LayerQuantizer(name, layer, record, chosen, index, inputs, reference)
                finished = None if store is None else store.load(name)
                if finished is not None:
                    work.adopt(finished)
                else:
                    work.quantize()
                    if name in trained and chosen:
                        _train(model, work, config)
                    if store is not None:
                        store.save(name, work.finished)
                if index + 1 < len(layers) or record.lm_head in configs:
                    with _run_time_attention(model, config) if trained else nullcontext():
                        work.advance()
                work.install()
                for found_here, everywhere in zip((work.clips, work.latents, work.starved), found, strict=True):
                    everywhere.update({prefix + path: value for path, value in found_here.items()})  # type: ignore[attr-defined]
                del work  # it holds the weights that were replaced
        if record.lm_head in configs:
            quantize_head(model, record, configs[record.lm_head], inputs, place.device)
    return found


def _to_train(record: Architecture, layers: Sequence[tuple[str, nn.Module]], config: QuarotConfig) -> set[str]:
    """The names of the layers that ``layer_steps`` trains: those without experts."""
    if not config.layer_steps:
        return set()
    names = {name for name, layer in layers if not has_experts(record, layer)}
    if len(names) < len(layers):
        counts = len(layers) - len(names), len(layers), config.layer_steps
        logger.warning("%d of %d decoder layers have experts and are not trained (layer_steps=%d)", *counts)
    return names


def _train(model: Any, work: LayerQuantizer, config: QuarotConfig) -> None:
    from quarot.tuning.layer import tune_layer

    tune_layer(model, work, config)


def _run_time_attention(model: Any, config: QuarotConfig) -> AbstractContextManager[None]:
    """Layers that are trained one after the other see the error of the cache in front of them as well."""
    from quarot.tuning.attention import quantized_attention

    return quantized_attention(model, config)


def _lower(config: QuarotConfig) -> str:
    batch = f"tune_batch_size (now {config.tune_batch_size}), " if config.layer_steps else ""
    return (
        f"{batch}calibration_samples (now {config.calibration_samples}) or calibration_length (now"
        f" {config.calibration_length}), or have one layer at a time on the device: load the model on the CPU and pass"
        " device=, or use quarot.quantize_checkpoint"
    )


def with_findings(config: QuarotConfig, clips: dict[str, float], starved: dict[str, int]) -> QuarotConfig:
    """The configuration with what was found, by module name: clips as overrides, and experts with too few tokens."""
    overrides = {
        re.escape(name): {**config.overrides.get(re.escape(name), {}), "a_clip": c} for name, c in clips.items()
    }
    if starved:
        _tell_starved(starved, config)
    return config.replace(overrides={**config.overrides, **overrides}, starved_experts=starved)


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
