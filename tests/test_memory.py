"""Out of memory: the error keeps its type, says what was being done and what to lower, and leaves things usable."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quarot
from quarot.quantization.layer import LayerQuantizer
from quarot.runtime.fused_decoder import FusedDecoder

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def full(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError(*FULL.args)


@pytest.fixture
def model(tiny_model: Any) -> Any:
    model = tiny_model("llama")
    quarot.rotate_model(model, progress=False)
    return quarot.quantize_model(model, w_method="rtn", progress=False)


def test_generate_names_its_sizes_and_works_again(
    model: Any, token_ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = quarot.generate(model, token_ids, max_new_tokens=3)
    with monkeypatch.context() as patch:
        patch.setattr(FusedDecoder, "run_layers", full)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            quarot.generate(model, token_ids, max_new_tokens=3, prefill_chunk=8)
    first, forward, whole = str(raised.value).splitlines()
    assert first == str(FULL)
    assert "a forward of 2 x 4 tokens: lower the batch, or the tokens at once" in forward
    assert "quarot.generate of 2 x 17 tokens and 3 new ones" in whole
    assert "prefill_chunk (now 8)" in whole
    assert torch.equal(quarot.generate(model, token_ids, max_new_tokens=3), wanted)


def test_model_generate_and_perplexity(model: Any, token_ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedDecoder, "run_layers", full)
    with pytest.raises(torch.OutOfMemoryError, match="2 x 17 tokens: lower the batch"):
        model.generate(token_ids, max_new_tokens=2)
    with pytest.raises(torch.OutOfMemoryError, match=r"batch_size \(now 3\) or window \(now 16\)"):
        quarot.perplexity(model, torch.arange(3, 120), window=16, batch_size=3, progress=False)


def test_quantising(tiny_model: Any, token_ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerQuantizer, "quantize", full)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"quantising model.layers.0: lower calibration_samples \(now 128\)"
    ):
        quarot.quantize_model(tiny_model("llama"), calibration=token_ids, progress=False)
