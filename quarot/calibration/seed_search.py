"""Choosing the seed of a random rotation by what it costs on calibration text.

R1's random signs decide how well the outliers of one particular model are spread; at 4 bits and round to nearest, seeds
differ (SmolLM2: perplexities of 134 to 143 for three of them). Searching costs nothing at run time: rotate, round to
nearest, and take the perplexity of a few calibration windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from quarot.calibration.windows import calibration_windows
from quarot.config import QuarotConfig
from quarot.evaluation import perplexity
from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model


def search_seed(
    load: Callable[[], Any],
    seeds: Iterable[int],
    config: QuarotConfig | None = None,
    *,
    tokenizer: Any = None,
    calibration: Any = None,
    windows: int = 8,
    length: int = 2048,
    progress: bool = True,
    **rotation: Any,
) -> tuple[int, dict[int, float]]:
    """The seed of least calibration perplexity, and the perplexity of every seed.

    Args:
        load: makes a fresh full-precision model, e.g. ``lambda: AutoModelForCausalLM.from_pretrained(path)``; one model
            exists at a time.
        seeds: for :func:`quarot.rotate_model`.
        config: bits, groups and clip ratios; the weights are rounded to nearest whatever it says.
        tokenizer, calibration: as for :func:`quarot.quantize_model`.
        windows, length: how much text judges, and tokens in each window.
        progress: show progress bars.
        rotation: further arguments of :func:`quarot.rotate_model`.

    Raises:
        ValueError: no seeds, or too little calibration text.
    """
    ids = calibration_windows(calibration, tokenizer, samples=windows, length=length, seed=0)
    config = (config or QuarotConfig()).replace(
        w_method="rtn", a_clip_search=False, tune_steps=0, layer_steps=0, rotation_steps=0
    )
    found: dict[int, float] = {}
    for seed in seeds:
        model = load()
        rotate_model(model, seed=seed, progress=progress, **rotation)
        quantize_model(model, config, progress=progress)
        found[seed] = perplexity(model, ids.flatten(), window=ids.shape[1], progress=progress).ppl
    if not found:
        raise ValueError("search_seed: no seeds to choose from")
    return min(found, key=found.__getitem__), found
