"""A rotated tiny model, text to calibrate on and text that it never sees, and the distance between two models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model


def _text(windows: int, seed: int) -> Tensor:
    return torch.randint(3, 128, (windows, 48), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def windows() -> Tensor:
    """To calibrate and train on, int64 [48, 48]."""
    return _text(48, seed=5)


@pytest.fixture
def unseen() -> Tensor:
    """To measure on, int64 [16, 48]."""
    return _text(16, seed=6)


@pytest.fixture
def rotated(tiny_model: Callable[..., nn.Module]) -> nn.Module:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    return model


@pytest.fixture
def quantize(windows: Tensor) -> Callable[..., Any]:
    """``quantize_model`` with the calibration text, in place."""
    return partial(quantize_model, calibration=windows, progress=False)


@pytest.fixture
def divergences(windows: Tensor, unseen: Tensor) -> Callable[[nn.Module, nn.Module], tuple[float, float]]:
    """Mean KL divergence of next-token distributions from those of a reference: on ``windows``, and on ``unseen``."""

    @torch.no_grad()
    def divergence(model: nn.Module, reference: nn.Module, ids: Tensor) -> float:
        own, wanted = (F.log_softmax(m(ids, use_cache=False).logits, -1) for m in (model, reference))
        return float((wanted.exp() * (wanted - own)).sum(-1).mean())

    return lambda model, reference: (divergence(model, reference, windows), divergence(model, reference, unseen))
