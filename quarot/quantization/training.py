"""What ``quantize_model`` trains on, and the training in front of the quantisation: that of the rotation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quarot.architectures import architecture_of, decoder_layers, geometry
from quarot.calibration.windows import calibration_windows, held_out
from quarot.config import QuarotConfig
from quarot.quantization.progress_store import ProgressStore, kept
from quarot.rotation.refinement import Refinement, rope_pairs
from quarot.tuning.material import Material

_HELD_OUT = 8
"""Windows of the end of the calibration text that nothing is trained on; they say when training did best."""


class Drawn(NamedTuple):
    """Token windows of the calibration text, int64 [W, T]: to train on, and held out."""

    training: Tensor
    held: Tensor


def training_windows(calibration: Any, tokenizer: Any, config: QuarotConfig) -> Drawn:
    """Windows apart from those of GPTQ, and the end of the text."""
    length = config.calibration_length
    rest, held = held_out(calibration, tokenizer, samples=_HELD_OUT, length=length)
    samples, seed = config.training_samples, config.seed + 1
    return Drawn(calibration_windows(rest, tokenizer, samples=samples, length=length, seed=seed), held)


def teach(model: Any, drawn: Drawn, config: QuarotConfig) -> Material:
    """The windows and the full-precision model's answers to them."""
    from quarot.tuning.tune import final_states

    windows = torch.cat(drawn)
    return Material(windows, final_states(model, windows, config.tune_batch_size), len(drawn.held))


def rounds_activations(config: QuarotConfig, configs: dict[str, QuarotConfig]) -> bool:
    """Whether a rotation can learn anything: weights stay as they are meanwhile."""
    return config.rounds_cache or any(chosen.a_bits < 16 for chosen in configs.values())


def learn_rotation(
    model: Any, config: QuarotConfig, material: Material, store: ProgressStore | None, progress: bool
) -> tuple[Material, Refinement]:
    """Refine the rotation of the model in place; the material comes back in the refined basis."""
    from quarot.rotation.learned import apply_refinement, learn_refinement

    def learned() -> dict[str, Tensor]:
        found, _ = learn_refinement(
            model,
            config,
            material,
            steps=config.rotation_steps,
            batch_size=config.tune_batch_size,
            progress=progress,
            seconds=config.tune_seconds,
        )
        return found.state_dict()

    refinement = Refinement(geometry(model), config.a_clip, material.targets.device, rope_pairs(model))
    refinement.load_state_dict(kept(store, "rotation", learned))
    residual = apply_refinement(model, refinement).float()
    return material._replace(targets=(material.targets.float() @ residual).to(material.targets.dtype)), refinement


def with_clips(model: Any, configs: dict[str, QuarotConfig], refinement: Refinement) -> dict[str, QuarotConfig]:
    """The layers' settings with the clip ratios that were learned with the rotation."""
    found = dict(configs)
    for index, (name, _) in enumerate(decoder_layers(model)):
        for slot, projections in architecture_of(model).slots.items():
            for full in (f"{name}.{projection.path}" for projection in projections):
                if full in found and found[full].a_bits < 16:
                    found[full] = found[full].replace(a_clip=refinement.clip(index, slot))
    return found
