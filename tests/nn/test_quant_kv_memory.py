"""Memory of the packed cache: growth, reserve, offloading, and what a failure leaves."""

from __future__ import annotations

import copy

import pytest
import torch

from quarot import QuantKVCache
from quarot.integrations.transformers.attention import quarot_attention
from quarot.nn.growing_buffer import GrowingBuffer
from quarot.nn.quant_kv_layer import QuantKVLayer


def test_growth_keeps_page_ids_and_codes(kv):
    cache = kv.new()
    key, value = kv.tokens(3, 200)
    kv.push(cache, key[:, :, :10], value[:, :, :10])
    before = [list(row) for row in cache.table.rows]
    for start in range(10, 200, 19):
        kv.push(cache, key[:, :, start : start + 19], value[:, :, start : start + 19])
    assert [row[:1] for row in cache.table.rows] == before
    whole = kv.new()
    kv.push(whole, key, value)
    assert kv.same(cache, whole)
    assert cache.memory_footprint() < 2 * 200 * 3 * kv.LAYERS * kv.HEADS * cache.layers[0].layout.bytes_per_token


def test_reserve_allocates_once(kv):
    cache = kv.new(reserve=160)
    key, value = kv.tokens(2, 8)
    kv.push(cache, key, value)
    pool = cache.layers[0].pool
    for step in range(152):  # up to the last reserved token
        kv.push(cache, *kv.tokens(2, 1, step))
    assert cache.layers[0].pool is pool
    assert not cache.table.free


def test_reset_keeps_memory_and_takes_another_batch(kv):
    cache = kv.new()
    kv.push(cache, *kv.tokens(4, 100))
    pages = cache.memory_footprint()
    cache.reset()
    assert cache.get_seq_length() == 0
    kv.push(cache, *kv.tokens(2, 30))
    fresh = kv.new()
    kv.push(fresh, *kv.tokens(2, 30))
    assert kv.same(cache, fresh)
    assert cache.memory_footprint() == pages


def test_offloaded_cache_gives_the_same(kv, monkeypatch):
    plain, away = kv.new(), kv.new(offloading=True)
    moved = []
    monkeypatch.setattr(type(away.layers[0]), "offload", lambda layer: moved.append(layer))
    for step, count in enumerate((20, 1, 30)):
        assert torch.equal(kv.push(plain, *kv.tokens(2, count, step)), kv.push(away, *kv.tokens(2, count, step)))
    assert len(moved) == 3 * kv.LAYERS


def test_memory_and_repr(kv):
    cache = QuantKVCache(kv.CONFIG, page_size=64)
    kv.push(cache, *kv.tokens(1, 64))
    per_token = 2 * (kv.DIM * 4 // 8 + 4)
    assert cache.layers[0].layout.bytes_per_token == per_token
    assert cache.memory_footprint() % (64 * kv.HEADS * per_token) == 0
    assert "key_bits=4" in repr(cache)
    assert "tokens=64" in repr(cache)


def test_failure_leaves_the_cache_usable(kv):
    cache, fresh = kv.new(), kv.new()
    key, value = kv.tokens(4, 21)
    kv.push(cache, key, value)
    cache.reorder_cache(torch.tensor([1, 1, 2, 3]))
    more = kv.tokens(4, 1, 5)
    handles = cache.update(*more, 0)
    query = torch.cat(more, dim=1)
    quarot_attention(kv.Attention(), query, *handles, None)
    handles = cache.update(*more, 1)
    with pytest.raises(ValueError, match="heads"):
        quarot_attention(kv.Attention(), torch.cat([query, query[:, :1]], 1), *handles, None)
    assert cache.get_seq_length() == 21
    kv.push(cache, *more)
    kv.push(fresh, key[[1, 1, 2, 3]], value[[1, 1, 2, 3]])
    kv.push(fresh, *more)
    assert kv.same(cache, fresh)


def test_out_of_memory_leaves_the_cache_usable(kv, monkeypatch):
    cache, fresh = kv.new(), kv.new()
    key, value = kv.tokens(2, 16)
    kv.push(cache, key, value)
    layer, plain, empty = cache.layers[1], QuantKVLayer.make_room, torch.empty

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def make_room(self, step):
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", full if self is layer else empty)
            plain(self, step)

    monkeypatch.setattr(QuantKVLayer, "make_room", make_room)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match=r"no memory on cpu for \d+ pages of 16 tokens"):
            kv.push(cache, *kv.tokens(2, 100, 4))
    assert cache.get_seq_length() == 16
    monkeypatch.undo()
    kv.push(cache, *kv.tokens(2, 3, 5))
    kv.push(fresh, key, value)
    kv.push(fresh, *kv.tokens(2, 3, 5))
    assert kv.same(cache, fresh)


class FakeBuffer:
    """Memory that grows in place, as csrc/memory gives on a GPU."""

    def __init__(self, device):
        self.memory = torch.zeros(1 << 20, dtype=torch.uint8, device=device)

    def tensor(self, nbytes):
        return self.memory[:nbytes]


def test_a_growing_pool_moves_once_where_memory_can_grow(kv, monkeypatch):
    monkeypatch.setattr("quarot.nn.quant_kv_layer.step_bytes", lambda device: 4096)
    monkeypatch.setattr("quarot.nn.quant_kv_layer.GrowingBuffer", FakeBuffer)
    cache, fresh = kv.new(), kv.new(reserve=400)
    key, value = kv.tokens(2, 300)
    kv.push(cache, key[:, :, :100], value[:, :, :100])
    assert cache.layers[0].buffer is None
    kv.push(cache, key[:, :, 100:150], value[:, :, 100:150])
    places = [layer.pool.data_ptr() for layer in cache.layers]
    pages = cache.layers[0].pool.shape[0]
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", lambda *args: pytest.fail("the past was copied"))
        kv.push(cache, key[:, :, 150:], value[:, :, 150:])
    assert cache.layers[0].pool.shape[0] > pages
    assert [layer.pool.data_ptr() for layer in cache.layers] == places
    kv.push(fresh, key, value)
    assert kv.same(cache, fresh)
    assert fresh.layers[0].buffer is None  # what was reserved needs no growing


def test_a_copy_of_a_growing_buffer_is_no_buffer():
    assert copy.deepcopy(GrowingBuffer.__new__(GrowingBuffer)) is None
