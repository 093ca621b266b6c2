"""A GPU that the extension has no code for: nothing asks it for a kernel, and no step is recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quarot.nn import quant_linear
from quarot.nn.quant_linear import QuantLinear
from quarot.ops import registry
from quarot.runtime import decode_graph
from quarot.runtime.linear_group import LinearGroup

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("reason", [None, "not built"])
def test_one_row_and_recording(reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "device_reason", lambda index: reason)
    monkeypatch.setattr(quant_linear, "_has_int4_mma", lambda index: False)
    monkeypatch.delenv("QUAROT_CUDA_GRAPHS", raising=False)
    row: Any = SimpleNamespace(shape=(1, 64), is_cuda=True, device=GPU)
    assert LinearGroup([QuantLinear(64, 32)])._few(row) == (reason is None)
    assert decode_graph.enabled(GPU) == (reason is None)
    assert not decode_graph.enabled(torch.device("cpu"))


def test_rows_that_no_kernel_makes_codes_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "device_reason", lambda index: None)
    monkeypatch.setattr(quant_linear, "_has_int4_mma", lambda index: False)
    row: Any = SimpleNamespace(shape=(1, 64), is_cuda=True, device=GPU)
    assert not LinearGroup([QuantLinear(64, 32)])._few(SimpleNamespace(**{**vars(row), "shape": (2, 64)}))  # type: ignore[arg-type]
    assert not LinearGroup([QuantLinear(64, 32, w_bits=8)])._few(row)
    assert not LinearGroup([QuantLinear(64, 32)])._few(torch.empty(1, 64))
