"""How large the outliers of activations are, layer input by layer input, and a picture of them (paper, figure 1)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quarot.architectures import architecture_of, decoder_layers, has_submodule
from quarot.ops.hadamard import hadamard_transform


@dataclass(frozen=True)
class Peaks:
    """One layer input over some tokens.

    Attributes:
        channels: largest magnitude of each channel, fp32 [K].
        ratio: mean over tokens of largest magnitude / root mean square: what a per-token grid must span.
    """

    channels: Tensor
    ratio: float


@torch.inference_mode()
def channel_peaks(model: Any, ids: Tensor, layer: int | None = None) -> dict[str, Peaks]:
    """Peaks of the inputs of one decoder layer's linear modules, as those modules quantise them (online rotations on).

    Args:
        ids: int64 [tokens].
        layer: index; None is the middle layer.

    Raises:
        ValueError: no such layer.
    """
    layers = list(decoder_layers(model))
    index = len(layers) // 2 if layer is None else layer
    if not -len(layers) <= index < len(layers):
        raise ValueError(f"layer {index} does not exist: the model has {len(layers)} layers")
    block, record = layers[index][1], architecture_of(model)
    chosen = (record.attn_in[0], record.attn_out, record.mlp_in[0], record.mlp_out)
    paths = [p.path for p in chosen if has_submodule(block, p.path)]
    found: dict[str, Peaks] = {}

    def watch(path: str) -> Any:
        def hook(module: Any, arguments: tuple[Tensor, ...]) -> None:
            x = arguments[0].reshape(-1, arguments[0].shape[-1]).float()
            spec = getattr(module, "input_rotation", None)
            x = x if spec is None else hadamard_transform(x, spec)
            ratio = (x.abs().amax(-1) / x.square().mean(-1).sqrt().clamp_min(1e-12)).mean().item()
            found[path] = Peaks(x.abs().amax(0).cpu(), ratio)

        return hook

    handles = [block.get_submodule(path).register_forward_pre_hook(watch(path)) for path in paths]
    try:
        model(ids[None].to(model.get_input_embeddings().weight.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def draw(before: dict[str, Peaks], after: dict[str, Peaks], out: Path, *, title: str = "") -> None:
    """A row of plots a layer input, each with both curves; written to ``out``.

    Raises:
        ImportError: matplotlib is missing, with what to install.
    """
    try:
        import matplotlib
    except ImportError:
        raise ImportError("plotting needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(len(before), 1, figsize=(9, 2.2 * len(before)), squeeze=False)
    for (name, old), axes in zip(before.items(), rows[:, 0], strict=True):
        new = after[name]
        axes.plot(old.channels.numpy(), linewidth=0.7, label=f"before, largest/rms {old.ratio:.1f}")
        axes.plot(new.channels.numpy(), linewidth=0.7, label=f"rotated, largest/rms {new.ratio:.1f}")
        axes.set_title(f"{title} input of {name}", fontsize=9)
        axes.set_ylabel("largest |x|", fontsize=8)
        axes.legend(fontsize=8)
    rows[-1, 0].set_xlabel("channel")
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    pyplot.close(figure)
