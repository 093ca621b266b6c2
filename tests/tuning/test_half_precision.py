"""Models in half precision are trained by the gradients that fp32 gives."""

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from quarot.rotation import learned
from quarot.tuning import layer, tune
from quarot.tuning.material import Material


@pytest.mark.parametrize(
    ("module", "steps"),
    [(tune, "tune_steps"), (layer, "layer_steps"), (learned, "rotation_steps")],
    ids=["tune", "layers", "rotation"],
)
def test_gradients_of_fp16_models_are_those_of_fp32(
    module: ModuleType,
    steps: str,
    rotated: nn.Module,
    quantize: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gradient of a mean over thousands of tokens is below the least positive number of fp16."""
    gradients: dict[torch.dtype, list[torch.Tensor]] = {}

    def first_step(loss_of: Any, groups: list[dict[str, Any]], material: Material, **_: Any) -> list[float]:
        (loss_of(material.windows[:8], material.targets[:8]) * 2.0**-12).backward()
        found = gradients.setdefault(dtype, [])
        found += [p.grad.clone() for group in groups for p in group["params"] if p.grad is not None]
        return [0.0]

    monkeypatch.setattr(module, "optimize", first_step)
    exact = rotated.half().float()
    for dtype in (torch.float32, torch.float16):
        model = quantize(copy.deepcopy(exact).to(dtype), **{steps: 1}, w_method="rtn", a_bits=8, training_samples=8)
        assert {p.dtype for p in model.model.norm.parameters()} == {dtype}
    for own, wanted in zip(gradients[torch.float16], gradients[torch.float32], strict=True):
        # Of a layer's clip ratio, one number, little is left where the rounding of its inputs has had its share.
        assert (own.numel() == 1 and module is layer) or (own - wanted).norm() < 0.3 * wanted.norm()
