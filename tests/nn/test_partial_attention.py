"""Attention in parts: every part right on its own, the merge equal to attention over all keys, no large temporaries."""

from __future__ import annotations

import contextlib
import math
import sys
import types

import pytest
import torch
from torch.nn.attention import SDPBackend

from quarot.integrations import flashinfer
from quarot.nn import partial_attention
from quarot.nn.partial_attention import Partial, attend, merge

SCALE = 0.2


def inputs(keys=37, queries=11, heads=6, kv_heads=2, batch=2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(keys)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return tuple(torch.randn(batch, h, n, 32, generator=generator, dtype=dtype) for h, n in shapes)


def dense(query, key, value, visible=None):
    """Out and base-2 lse in float64, everything at once."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    score = query.double() @ key.transpose(2, 3) * SCALE
    if visible is not None:
        score = score.masked_fill(~visible, -math.inf)
    weight = torch.softmax(score, -1).nan_to_num(0.0)
    return weight @ value, torch.logsumexp(score, -1) / math.log(2)


@pytest.mark.parametrize("rows", [1, 4, 1000], ids=["row by row", "blocks", "at once"])
@pytest.mark.parametrize("kind", ["all", "causal", "mask", "keys", "nothing for some"])
def test_a_part_equals_dense_attention(kind, rows, monkeypatch):
    query, key, value = inputs(keys=11 if kind == "causal" else 37)
    monkeypatch.setattr(partial_attention, "_MOST_SCORES", rows * 2 * 6 * key.shape[2])
    generator = torch.Generator().manual_seed(0)
    visible = {
        "causal": torch.ones(11, 11, dtype=torch.bool).tril(),
        "mask": torch.rand(2, 1, 11, 37, generator=generator) > 0.5,
        "keys": torch.rand(2, 1, 1, 37, generator=generator) > 0.5,
        "nothing for some": (torch.arange(11) % 2 == 0)[None, None, :, None].expand(2, 1, 11, 37),
    }.get(kind)
    given = {"causal": True} if kind == "causal" else {"visible": visible}
    out, lse = attend(query, key, value, SCALE, **given)
    expected, expected_lse = dense(query, key, value, visible)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("cuts", [(20,), (1, 36), (7, 8, 30)])
def test_merged_parts_equal_the_whole(cuts, dtype):
    query, key, value = inputs(dtype=dtype)
    visible = torch.ones(2, 1, 11, 37, dtype=torch.bool)
    visible[0, :, 3] = False  # a query without keys
    visible[1, :, :, :20] = False  # a row whose first part is empty
    part = None
    for start, stop in zip((0, *cuts), (*cuts, 37), strict=True):
        keys = slice(start, stop)
        more = attend(query, key[:, :, keys], value[:, :, keys], SCALE, visible=visible[..., keys])
        part = more if part is None else merge(part, more)
    expected, expected_lse = dense(query, key, value, visible)
    seen = ~expected_lse.isneginf()
    tolerance = 2e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(part.out.double()[seen], expected[seen], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(part.lse.double()[seen], expected_lse[seen], rtol=tolerance, atol=tolerance)
    assert part.out.isfinite().all()


def test_merge_of_far_apart_and_empty_parts():
    out = torch.tensor([1.0, 2.0, 3.0])[None, None, :, None]
    one = Partial(out.clone(), torch.tensor([[[0.0, -math.inf, -math.inf]]]))
    other = Partial(-out, torch.tensor([[[-300.0, 5.0, -math.inf]]]))
    both = merge(one, other)
    assert both.out.flatten().tolist()[:2] == [1.0, -2.0]
    assert both.lse.flatten().tolist() == [0.0, 5.0, -math.inf]
    assert both.out.isfinite().all()


@pytest.mark.parametrize("choice", [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION])
def test_kernels_that_pytorch_would_not_take_are_not_taken(choice, monkeypatch):
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **kwargs: choice.value)
    assert partial_attention._unmasked(*inputs(), SCALE, False) is None


@pytest.fixture
def cudnn(monkeypatch):
    """cuDNN as if it were there and PyTorch chose it: plain products, and the sizes it was called with."""
    sizes = set()

    def run(query, key, value, bias, scale, causal=False):
        count = query.shape[2]
        query = partial_attention._longer(query, partial_attention.rounded(count))
        assert key.shape == value.shape
        if bias is not None:
            assert bias.shape[-1] == key.shape[2] and bias.shape[-2] in (1, query.shape[2])
        sizes.add((query.shape[2], key.shape[2], None if bias is None else bias.shape[-2] > 1))
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril() if causal else None
        score = (query @ key.transpose(2, 3) * scale).double()
        score = score if bias is None else score + bias
        score = score if mask is None else score.masked_fill(~mask, -math.inf)
        out = (torch.softmax(score, -1).to(value.dtype) @ value)[:, :, :count]
        return Partial(out, torch.logsumexp(score, -1)[:, :, :count] / math.log(2))

    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *a, **k: SDPBackend.CUDNN_ATTENTION.value)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    monkeypatch.setattr(partial_attention, "_cudnn", run)
    return sizes


@pytest.mark.parametrize("kind", ["causal", "mask", "keys", "nothing for some"])
def test_cudnn_sees_few_different_sizes(kind, cudnn):
    """It plans each anew, which takes longer than computing; what is added to round them up changes nothing."""
    for count in (130, 131, 200, 255, 256):
        length = count if kind == "causal" else 2 * count
        query, key, value = inputs(keys=length, queries=count, kv_heads=6, dtype=torch.float64)
        generator = torch.Generator().manual_seed(0)
        visible = {
            "mask": torch.rand(2, 1, count, length, generator=generator) > 0.5,
            "keys": torch.rand(2, 1, 1, length, generator=generator) > 0.5,
            "nothing for some": (torch.arange(count) % 2 == 0)[None, None, :, None].expand(2, 1, count, length),
            "causal": torch.ones(count, count, dtype=torch.bool).tril(),
        }[kind]
        if kind == "causal":
            out, lse = partial_attention._unmasked(query, key, value, SCALE, True)
        else:
            out, lse = partial_attention._biased(query, key, value, SCALE, visible)
        expected, expected_lse = dense(query, key, value, visible)
        seen = ~expected_lse.isneginf()
        torch.testing.assert_close(out[seen], expected[seen])
        torch.testing.assert_close(lse[seen], expected_lse[seen])
        assert out.isfinite().all() and (lse[~seen] < -1e4).all()
    assert len(cudnn) <= 2


def test_sizes_are_rounded_up_by_an_eighth_at_most():
    sizes = [partial_attention.rounded(length) for length in range(1, 20000)]
    assert sizes == sorted(sizes) and len(set(sizes)) < 60
    assert all(length <= size < max(1.125 * length, length + 128) for length, size in enumerate(sizes, 1))
    assert all(size % 128 == 0 for size in sizes)


def test_keys_that_are_added_are_zero():
    x = torch.full((2, 3, 5, 4), torch.nan)
    every = partial_attention._every_head(x, 6, 8)
    assert every.shape == (2, 6, 8, 4)
    assert every[:, :, :5].isnan().all() and (every[:, :, 5:] == 0).all()


class FakeFlashInfer:
    """Behaves as flashinfer's ragged wrapper does, on any device."""

    plans = 0

    def __init__(self, workspace, layout, backend):
        assert layout == "NHD"

    def plan(self, queries, keys, heads, kv_heads, dim, *, causal, sm_scale, q_data_type, kv_data_type):
        type(self).plans += 1
        self.sizes = (len(queries) - 1, int(queries[1]), int(keys[1]), heads, kv_heads, dim)
        self.causal, self.scale = causal, sm_scale

    def run(self, query, key, value, return_lse):
        batch, count, length, heads, kv_heads, dim = self.sizes
        query = query.view(batch, count, heads, dim).transpose(1, 2).float()
        key, value = (x.view(batch, length, kv_heads, dim).transpose(1, 2).float() for x in (key, value))
        mask = torch.ones(count, length, dtype=torch.bool).tril() if self.causal else None
        out, lse = partial_attention._plain(query, key, value, self.scale, mask)
        return out.transpose(1, 2).flatten(0, 1).half(), lse.transpose(1, 2).flatten(0, 1)


@pytest.fixture
def fake_flashinfer(monkeypatch):
    """flashinfer as if it were installed and served this machine's tensors."""
    module = types.ModuleType("flashinfer")
    module.BatchPrefillWithRaggedKVCacheWrapper = type("Wrapper", (FakeFlashInfer,), {"plans": 0})
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "_serves", lambda query, key: query.dtype == torch.float16)
    monkeypatch.setattr(flashinfer.registry, "stream", lambda tensor: 0)
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    for cache in (flashinfer._wrapper, flashinfer._workspace):
        cache.cache_clear()
    yield module.BatchPrefillWithRaggedKVCacheWrapper
    flashinfer._wrapper.cache_clear()
    flashinfer._broken.clear()


@pytest.mark.parametrize("causal", [False, True])
def test_flashinfer_serves_where_it_can(fake_flashinfer, causal):
    query, key, value = (x.half() for x in inputs(keys=11))
    for _ in range(3):  # three layers share a plan
        out, lse = attend(query, key, value, SCALE, causal=causal)
    visible = torch.ones(11, 11, dtype=torch.bool).tril() if causal else None
    expected, expected_lse = dense(query, key, value, visible)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)
    assert fake_flashinfer.plans == 1
    attend(query, key, value, SCALE, visible=torch.ones(11, 11, dtype=torch.bool))
    assert fake_flashinfer.plans == 1  # a mask is not its business


def test_flashinfer_that_fails_is_left_alone(fake_flashinfer, monkeypatch, caplog):
    def plan(self, *args, **kwargs):
        raise RuntimeError("no nvcc here")

    monkeypatch.setattr(fake_flashinfer, "plan", plan)
    query, key, value = (x.half() for x in inputs(keys=11))
    out, _ = attend(query, key, value, SCALE)
    assert "no nvcc here" in caplog.text
    torch.testing.assert_close(out.double(), dense(query, key, value)[0], rtol=2e-3, atol=2e-3)
    assert flashinfer._broken


def test_flashinfer_is_refused_by_its_variable(monkeypatch):
    monkeypatch.setenv("QUAROT_FLASHINFER", "fa7")
    with pytest.raises(ValueError, match="QUAROT_FLASHINFER='fa7' is not one of auto, fa2, fa3, 0"):
        flashinfer.backend()
