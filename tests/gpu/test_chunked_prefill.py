"""Chunks over a packed past on a GPU: parts of attention, their merge, bounded memory, a pool that grows in place."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from transformers import LlamaConfig

from quarot import QuantKVCache
from quarot.integrations import flashinfer
from quarot.integrations.transformers.attention import quarot_attention
from quarot.nn.growing_buffer import step_bytes
from quarot.nn.partial_attention import attend, merge
from quarot.nn.quant_kv_layer import QuantKVLayer
from quarot.ops import registry
from quarot.ops.merge_partials import merge_partials

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DIM = 128


class Attention(torch.nn.Module):
    num_key_value_groups, is_causal, training = 4, True, False


def new_cache(layers=1, **options):
    config = LlamaConfig(num_attention_heads=32, num_key_value_heads=8, head_dim=DIM, num_hidden_layers=layers)
    return QuantKVCache(config, **options)


def tokens(batch, count, seed=0, dtype=torch.float16):
    generator = torch.Generator("cuda").manual_seed(seed)
    return tuple(
        torch.randn(batch, heads, count, DIM, generator=generator, device="cuda").to(dtype) for heads in (32, 8, 8)
    )


def push(cache, query, key, value, mask=None, **options):
    outs = []
    for index in range(len(cache.layers)):
        handles = cache.update(key, value, index)
        outs.append(quarot_attention(Attention(), query, *handles, mask, **options)[0])
    return torch.stack(outs)


def exact(query, key, value, scale, visible, dtype=torch.float64):
    """Attention and base-2 lse in ``dtype``, scores in float64."""
    key, value = (x.to(dtype).repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    score = (query.to(dtype) @ key.transpose(2, 3)).double() * scale
    score = score if visible is None else score.masked_fill(~visible, -math.inf)
    weight = torch.softmax(score, -1).nan_to_num(0.0).to(dtype)
    return weight @ value, torch.logsumexp(score, -1) / math.log(2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["all", "causal", "mask", "keys"])
def test_parts_and_their_merge(kind, dtype):
    query, key, value = tokens(2, 203, dtype=dtype)
    generator = torch.Generator("cuda").manual_seed(3)
    visible = {
        "causal": torch.ones(203, 203, dtype=torch.bool, device="cuda").tril(),
        "mask": torch.rand(2, 1, 203, 203, device="cuda", generator=generator) > 0.5,
        "keys": torch.rand(2, 1, 1, 203, device="cuda", generator=generator) > 0.5,
    }.get(kind)
    if kind == "mask":
        visible[1, :, 7] = False  # a query that sees nothing here
    given = {"causal": True} if kind == "causal" else {"visible": visible}
    part = attend(query, key, value, 0.1, **given)
    out, lse = exact(query, key, value, 0.1, visible)
    half = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
    allowed = 2 * (exact(query, key, value, 0.1, visible, half)[0].double() - out).norm()
    seen = ~lse.isneginf()
    assert (part.out.double() - out)[seen].norm() <= allowed
    assert (part.lse.double() - lse)[seen].abs().max() < (0.02 if dtype == torch.bfloat16 else 5e-3)
    assert (part.lse[~seen] < -1e4).all()
    more = tokens(2, 90, 9, dtype)
    both = merge(part, attend(query, *more[1:], 0.1))
    everything = None
    if visible is not None:
        everything = torch.cat([visible.expand(2, 1, 203, 203), visible.new_ones(2, 1, 203, 90)], -1)
    keys, values = (torch.cat(pair, 2) for pair in zip((key, value), more[1:], strict=True))
    out, _ = exact(query, keys, values, 0.1, everything)
    allowed = 2 * (exact(query, keys, values, 0.1, everything, half)[0].double() - out).norm()
    assert (both.out.double() - out).norm() <= allowed


@pytest.mark.parametrize("dtypes", [(torch.float16,) * 3, (torch.float32, torch.bfloat16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("dim", [80, 128])
def test_merge_partials_agrees_with_its_reference(dim, dtypes):
    shape = (2, 5, 33, dim)
    one = torch.randn(2, 33, 5, dim, device="cuda").to(dtypes[0]).transpose(1, 2)
    other = torch.randn(*shape[:3], dim + 4, device="cuda").to(dtypes[1])[..., :dim]
    lse, other_lse = (20 * torch.randn(n, 5, 2, device="cuda").transpose(0, 2) for n in (33, 33))
    lse[0, :, 3] = other_lse[0, 1, :9] = -math.inf
    got = merge_partials(one, lse, other, other_lse, dtypes[2])
    with registry.reference_backend():
        expected = merge_partials(one, lse, other, other_lse, dtypes[2])
    tolerance = 1e-2 if dtypes[2] == torch.bfloat16 else 2e-3
    torch.testing.assert_close(got[0], expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1], expected[1])
    assert got[0].stride() == expected[0].stride()


@pytest.mark.skipif(not flashinfer.installed(), reason="needs flashinfer")
@pytest.mark.parametrize("causal", [False, True])
def test_flashinfer_serves(causal):
    query, key, value = tokens(2, 203)
    served = flashinfer.attend(query, key, value, 0.1, causal)
    assert served is not None, flashinfer._broken
    visible = torch.ones(203, 203, dtype=torch.bool, device="cuda").tril() if causal else None
    out, lse = exact(query, key, value, 0.1, visible)
    allowed = 2 * (exact(query, key, value, 0.1, visible, torch.float16)[0].double() - out).norm()
    assert (served[0].double() - out).norm() <= allowed
    assert (served[1].double() - lse).abs().max() < 5e-3


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("path", ["packed", "blocks"])
def test_chunk_equals_dense_attention(path, padded, window, monkeypatch):
    monkeypatch.setattr(QuantKVLayer, "PACKED_ROWS", 10**6 if path == "packed" else 0)
    monkeypatch.setattr(QuantKVLayer, "BLOCK_ELEMENTS", 0)
    monkeypatch.setattr(QuantKVLayer, "LEAST_BLOCK", 192)
    cache, starts = new_cache(), [0, 250] if padded else [0, 0]
    first = torch.arange(450, device="cuda") >= torch.tensor(starts, device="cuda")[:, None]
    mask = torch.ones(450, 450, dtype=torch.bool, device="cuda").tril() & first[:, None, None, :] if padded else None
    push(cache, *tokens(2, 450), mask)
    layer, lengths = cache.layers[0], [450 - start for start in starts]
    places = [torch.arange(length, device="cuda") for length in lengths]
    table = cache.table.table(layer.device)
    past = [layer.gather((table[r][p // 64].long() * 64 + p % 64)[None]) for r, p in enumerate(places)]
    query, key, value = tokens(2, 170, 5)
    own = torch.ones(170, 170, dtype=torch.bool, device="cuda").tril()
    if window:
        own &= ~torch.ones_like(own).tril(-window)
    mask = own.expand(2, 1, 170, 170) if window else None
    out = push(cache, query, key, value, mask, sliding_window=window or None)[0]
    for row, length in enumerate(lengths):
        keys = torch.cat([past[row][0], layer.format.rotate_heads(key[row : row + 1])], 2)
        values = torch.cat([past[row][1], value[row : row + 1]], 2)
        place, mine = torch.arange(length + 170, device="cuda"), length + torch.arange(170, device="cuda")[:, None]
        visible = (place <= mine) & (place > mine - window if window else place >= 0)
        rotated = layer.format.rotate_heads(query[row : row + 1])
        expected, _ = exact(rotated, keys, values, DIM**-0.5, visible)
        eager, _ = exact(rotated, keys, values, DIM**-0.5, visible, torch.float16)
        error = (out[row : row + 1].transpose(1, 2).double() - expected).norm()
        assert error <= 2 * (eager.double() - expected).norm()


@pytest.mark.parametrize("window", [0, 1024])
def test_memory_of_a_chunk_does_not_grow_with_the_past(window, monkeypatch):
    monkeypatch.setattr(QuantKVLayer, "BLOCK_ELEMENTS", 4096 * 8 * DIM)
    peaks = []
    for past in (16384, 65536):  # 4 and 16 blocks
        cache = new_cache(reserve=past + 2048)
        for start in range(0, past, 8192):
            push(cache, *tokens(1, 8192, start))
        chunk = tokens(1, 2048, 1)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        push(cache, *chunk, sliding_window=window or None)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 1.02 * peaks[0]


@pytest.mark.skipif(registry.extension() is None, reason="needs the compiled extension")
def test_a_growing_pool_stays_where_it_is(monkeypatch):
    extension, released = registry.extension(), {}  # what the GPU has free is other processes' doing, too
    release = extension.release_addresses

    def note_and_release(address, mapped, reserved):
        released[address] = mapped
        release(address, mapped, reserved)

    monkeypatch.setattr(extension, "release_addresses", note_and_release)
    step = step_bytes(torch.device("cuda", 0))
    assert step > 0
    cache, fresh = new_cache(layers=2), new_cache(layers=2, reserve=9000)
    query, key, value = tokens(2, 9000)
    push(cache, query[:, :, :2000], key[:, :, :2000], value[:, :, :2000])
    push(cache, query[:, :, 2000:3000], key[:, :, 2000:3000], value[:, :, 2000:3000])  # moves, once
    places = [layer.pool.data_ptr() for layer in cache.layers]
    first = cache.layers[0].pool.numel()
    assert first >= step
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for start in range(3000, 9000, 1000):
        part = slice(start, start + 1000)
        push(cache, query[:, :, part], key[:, :, part], value[:, :, part])
    assert [layer.pool.data_ptr() for layer in cache.layers] == places
    grown = cache.memory_footprint() - 2 * first
    mapped = sum(layer.pool.numel() for layer in cache.layers)
    assert torch.cuda.memory_allocated() - before < grown  # not in PyTorch's memory
    push(fresh, query, key, value)
    slots = torch.arange(9000, device="cuda").expand(2, -1)
    for one, other in zip(cache.layers, fresh.layers, strict=True):
        pairs = []
        for layer, table in ((one, cache.table), (other, fresh.table)):
            pages = table.table(layer.device).long()
            pairs.append(layer.gather(pages.gather(1, slots // 64) * 64 + slots % 64))
        assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
    assert not set(places) & set(released)
    del cache, one, other, layer, table, pairs
    gc.collect()
    assert sum(released[place] for place in places) >= mapped
