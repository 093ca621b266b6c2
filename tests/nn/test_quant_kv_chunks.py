"""Several new tokens over a filled cache: what dense attention gives, without a tensor as long as the past."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quarot.integrations.transformers.attention import quarot_attention
from quarot.nn.quant_kv_layer import QuantKVLayer


def dense_chunk(kv, cache, query, key, value, past, lengths, valid, window):
    """Attention of new tokens over stored and own unquantised tokens, row by row in float64: what _chunk must equal."""
    layer, outs = cache.layers[0], torch.zeros(query.shape, dtype=torch.float64)
    for row, length in enumerate(lengths):
        real = torch.arange(query.shape[2]) if valid is None else valid[row].nonzero()[:, 0]
        stored_key, stored_value = (x.double() for x in past[row])
        own_key = layer.format.rotate_heads(key[row][:, real]).double()
        keys = torch.cat([stored_key, own_key], 1).repeat_interleave(2, 0)
        values = torch.cat([stored_value, value[row][:, real].double()], 1).repeat_interleave(2, 0)
        rotated = layer.format.rotate_heads(query[row][:, real]).double()
        place, own = torch.arange(keys.shape[1]), length + torch.arange(len(real))[:, None]
        hidden = (place > own) | (place <= own - window if window else False)
        score = (rotated @ keys.transpose(1, 2) * kv.DIM**-0.5).masked_fill(hidden, -torch.inf)
        outs[row][:, real] = torch.softmax(score, -1) @ values
    return outs.transpose(1, 2)


def gathered(layer, cache, lengths):
    """Dequantised (keys, values) of every row, [kv_heads, length, D]."""
    rows = []
    for row, length in enumerate(lengths):
        place = torch.arange(length)
        table = cache.table.pages if cache.is_static else cache.table.table(layer.device)
        slots = table[row][place // cache.page_size].long() * cache.page_size + place % cache.page_size
        rows.append([x[0] for x in layer.gather(slots[None])])
    return rows


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("window", [0, 1, 7, 30, 90])
@pytest.mark.parametrize("padding", ["none", "left", "middle"])
@pytest.mark.parametrize("path", ["packed", "one block", "blocks"])
def test_chunk_over_a_past_equals_dense_attention(kv, path, padding, window, static, monkeypatch):
    monkeypatch.setattr(QuantKVLayer, "PACKED_ROWS", 1000 if path == "packed" else 0)
    monkeypatch.setattr(QuantKVLayer, "BLOCK_ELEMENTS", 0)
    monkeypatch.setattr(QuantKVLayer, "LEAST_BLOCK", 16 if path == "blocks" else 1000)
    cache = kv.new(**({"max_batch": 3, "max_length": 96} if static else {}))
    first, valid = torch.ones(3, 40, dtype=torch.bool), None
    if padding != "none":
        first = torch.arange(40) >= torch.tensor([0, 11, 40])[:, None]  # the last row is all padding so far
        valid = torch.arange(24) >= torch.tensor([0, 0, 5])[:, None]
        if padding == "middle":
            valid[1, 6:9] = False
    kv.push(cache, *kv.tokens(3, 40), None if padding == "none" else kv.left_mask(first))
    lengths = first.sum(1).tolist()
    past = gathered(cache.layers[0], cache, lengths)
    key, value = kv.tokens(3, 24, 5)
    query = torch.randn(3, 2 * kv.HEADS, 24, kv.DIM, generator=torch.Generator().manual_seed(6))
    handles = cache.update(key, value, 0)
    mask = None if valid is None else kv.left_mask(valid)
    if valid is not None and window:
        rank = valid.cumsum(1)
        mask = mask & (rank[:, None, None, :] > rank[:, None, :, None] - window)
    out, _ = quarot_attention(kv.Attention(), query, *handles, mask, sliding_window=window or None)
    expected = dense_chunk(kv, cache, query, key, value, past, lengths, valid, window)
    real = torch.ones(3, 24, dtype=torch.bool) if valid is None else valid
    torch.testing.assert_close(out.double()[real], expected[real], rtol=1e-4, atol=1e-5)
    assert out.isfinite().all()


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation made; the pools do not count."""

    def __init__(self, pools):
        super().__init__()
        self.pools, self.most = pools, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.pools:
                self.most = max(self.most, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_memory_of_a_chunk_does_not_grow_with_the_past(kv, padded, window, monkeypatch):
    monkeypatch.setattr(QuantKVLayer, "PACKED_ROWS", 0)
    monkeypatch.setattr(QuantKVLayer, "BLOCK_ELEMENTS", 0)
    monkeypatch.setattr(QuantKVLayer, "LEAST_BLOCK", 64)
    most = []
    for past in (256, 2048):
        cache = kv.new(reserve=past + 32)
        kv.push(cache, *kv.tokens(2, past))
        key, value = kv.tokens(2, 32, 1)
        mask = kv.left_mask(torch.arange(32) >= torch.tensor([0, 3])[:, None]) if padded else None
        handles = cache.update(key, value, 0)
        pools = {layer.pool.untyped_storage().data_ptr() for layer in cache.layers}
        with LargestTensor(pools) as largest:
            quarot_attention(kv.Attention(), torch.cat([key, value], 1), *handles, mask, sliding_window=window or None)
        most.append(largest.most)
    assert most[0] == most[1]


def test_layers_look_up_the_past_once(kv, monkeypatch):
    monkeypatch.setattr(QuantKVLayer, "PACKED_ROWS", 0)
    looked, find = [], QuantKVLayer._find_block
    monkeypatch.setattr(QuantKVLayer, "_find_block", lambda layer, *args: looked.append(layer) or find(layer, *args))
    cache = kv.new()
    kv.push(cache, *kv.tokens(2, 40))
    for step in range(2):
        kv.push(cache, *kv.tokens(2, 20, step))
    assert looked == [cache.layers[0]] * 2
