"""The packed cache on its own: rows, pages, sharing, growth. A changed cache equals one built afresh, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from quarot import QuantKVCache
from quarot.integrations.transformers.attention import quarot_attention
from quarot.nn.growing_buffer import GrowingBuffer
from quarot.nn.quant_kv_layer import QuantKVLayer

HEADS, DIM, LAYERS = 2, 32, 2
CONFIG = LlamaConfig(num_attention_heads=4, num_key_value_heads=HEADS, head_dim=DIM, num_hidden_layers=LAYERS)


def new_cache(**options):
    return QuantKVCache(CONFIG, **({"page_size": 16} | options))


class Attention(torch.nn.Module):
    """What the attention function needs to know of a module."""

    num_key_value_groups, is_causal, training = 2, True, False


def tokens(batch, count, seed=0, heads=HEADS, dim=DIM):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, count, dim, generator=generator) for _ in range(2))


def push(cache, key, value, mask=None):
    """One forward through every layer; returns the attention outputs."""
    query = torch.cat([key, value], dim=1)
    outs = []
    for index in range(LAYERS):
        handles = cache.update(key * (index + 1), value, index)
        outs.append(quarot_attention(Attention(), query, *handles, mask)[0])
    return torch.stack(outs)


def left_mask(valid):
    """4D mask of new tokens from bool [B, T]."""
    count = valid.shape[1]
    return torch.ones(count, count, dtype=torch.bool).tril() & valid[:, None, None, :]


def stored(cache, layer=0):
    """Dequantised keys and values of every row, as a list of [length, 2 * heads * dim]."""
    one = cache.layers[layer]
    rows = []
    for row, length in enumerate(cache.table.lengths[: cache.table.batch].tolist()):
        position = torch.arange(length)
        table = cache.table.table(one.device) if not cache.is_static else cache.table.pages
        slots = table[row][position // cache.page_size].long() * cache.page_size + position % cache.page_size
        key, value = one.gather(slots[None])
        rows.append(torch.cat([key[0].transpose(0, 1), value[0].transpose(0, 1)], 1).flatten(1))
    return rows


def same(one, other):
    for layer in range(LAYERS):
        a, b = stored(one, layer), stored(other, layer)
        if len(a) != len(b) or any(not torch.equal(x, y) for x, y in zip(a, b, strict=True)):
            return False
    return True


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("more", [1, 2, 5, 20])
def test_append_to_any_length_equals_one_append(length, more):
    key, value = tokens(2, length + more)
    whole, parts = new_cache(), new_cache()
    push(whole, key, value)
    push(parts, key[:, :, :length], value[:, :, :length])
    push(parts, key[:, :, length:], value[:, :, length:])
    assert parts.get_seq_length() == length + more
    assert same(whole, parts)


def test_growth_keeps_page_ids_and_codes():
    cache = new_cache()
    key, value = tokens(3, 200)
    push(cache, key[:, :, :10], value[:, :, :10])
    before = [list(row) for row in cache.table.rows]
    for start in range(10, 200, 19):
        push(cache, key[:, :, start : start + 19], value[:, :, start : start + 19])
    assert [row[:1] for row in cache.table.rows] == before
    whole = new_cache()
    push(whole, key, value)
    assert same(cache, whole)
    assert cache.memory_footprint() < 2 * 200 * 3 * LAYERS * HEADS * cache.layers[0].layout.bytes_per_token


def test_reserve_allocates_once():
    cache = new_cache(reserve=160)
    key, value = tokens(2, 8)
    push(cache, key, value)
    pool = cache.layers[0].pool
    for step in range(152):  # up to the last reserved token
        push(cache, *tokens(2, 1, step))
    assert cache.layers[0].pool is pool
    assert not cache.table.free


@pytest.mark.parametrize("static", [False, True])
def test_padding_is_not_stored(static):
    size = {"max_batch": 3, "max_length": 64} if static else {}
    cache = new_cache(**size)
    key, value = tokens(3, 17)
    valid = torch.arange(17)[None] >= torch.tensor([0, 6, 16])[:, None]
    out = push(cache, key, value, left_mask(valid))
    assert cache.table.lengths.tolist() == [17, 11, 1]
    decoded = push(cache, *tokens(3, 1, 7))
    for row, skip in enumerate([0, 6, 16]):
        alone = new_cache()
        own = push(alone, key[row : row + 1, :, skip:], value[row : row + 1, :, skip:])
        torch.testing.assert_close(out[:, row, skip:], own[:, 0], rtol=1e-5, atol=1e-5)
        one = tuple(x[row : row + 1] for x in tokens(3, 1, 7))
        torch.testing.assert_close(decoded[:, row], push(alone, *one)[:, 0], rtol=1e-5, atol=1e-5)
        assert torch.equal(stored(cache)[row], stored(alone)[0])


def test_padding_in_the_middle_and_crop_across_it():
    cache, fresh = new_cache(), new_cache()
    key, value = tokens(2, 40)
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[0, :5] = valid[1, 18:24] = False
    for start, stop in ((0, 18), (18, 40)):
        part = slice(start, stop)
        push(cache, key[:, :, part], value[:, :, part], left_mask(valid[:, part]))
    assert cache.table.lengths.tolist() == [35, 34]
    cache.crop(-20)
    push(fresh, key[:, :, :18], value[:, :, :18], left_mask(valid[:, :18]))
    push(fresh, key[:, :, 18:20], value[:, :, 18:20], left_mask(valid[:, 18:20]))
    assert cache.table.lengths.tolist() == [15, 18]
    assert same(cache, fresh)


@pytest.mark.parametrize("static", [False, True])
def test_crop_and_regrow_equals_fresh(static):
    size = {"max_batch": 2, "max_length": 96} if static else {}
    cache, fresh = new_cache(**size), new_cache(**size)
    key, value = tokens(2, 50)
    push(cache, key, value)
    cache.crop(-13)
    assert int(cache.get_seq_length()) == 37
    push(cache, *tokens(2, 30, 5))
    push(fresh, key[:, :, :37], value[:, :, :37])
    push(fresh, *tokens(2, 30, 5))
    assert same(cache, fresh)
    cache.crop(20)
    assert int(cache.get_seq_length()) == 20
    cache.crop(0)
    assert int(cache.get_seq_length()) == 20
    cache.crop(-100)
    assert int(cache.get_seq_length()) == 0


@pytest.mark.parametrize("static", [False, True])
def test_reorder_then_append(static):
    size = {"max_batch": 4, "max_length": 64} if static else {}
    cache, fresh = new_cache(**size), new_cache(**size)
    key, value = tokens(4, 21)
    order = torch.tensor([2, 2, 0, 3])
    push(cache, key, value)
    cache.reorder_cache(order)
    push(cache, *tokens(4, 1, 9))
    push(fresh, key[order], value[order])
    push(fresh, *tokens(4, 1, 9))
    assert same(cache, fresh)


def test_repeated_rows_share_pages_until_they_write():
    cache = new_cache()
    key, value = tokens(1, 70)
    push(cache, key, value)
    used = cache.table.num_pages - len(cache.table.free)
    cache.batch_repeat_interleave(8)
    assert cache.table.num_pages - len(cache.table.free) == used
    push(cache, *tokens(8, 1, 3))
    assert cache.table.num_pages - len(cache.table.free) == used + 7  # each row copied the last page, one kept it
    fresh = new_cache()
    push(fresh, key.expand(8, -1, -1, -1), value.expand(8, -1, -1, -1))
    push(fresh, *tokens(8, 1, 3))
    assert same(cache, fresh)
    cache.batch_select_indices(torch.tensor([0]))
    assert cache.table.num_pages - len(cache.table.free) == used


def test_equal_prompts_are_stored_once():
    key, value = (x.repeat_interleave(3, 0) for x in tokens(2, 37))
    valid = (torch.arange(37) >= torch.tensor([0, 0, 0, 20, 20, 20])[:, None]).clone()
    shared, fresh = new_cache(), new_cache()
    shared._expect_repeats(3)
    out = push(shared, key, value, left_mask(valid))
    assert torch.equal(out, push(fresh, key, value, left_mask(valid)))
    assert shared.table.num_pages - len(shared.table.free) == 3 + 2
    assert same(shared, fresh)
    more = tokens(6, 1, 8)
    assert torch.equal(push(shared, *more), push(fresh, *more))
    assert same(shared, fresh)
    shared.reset()
    assert len(shared.table.free) == shared.table.num_pages
    other = tokens(6, 5, 9)  # another prompt, of rows that differ
    assert torch.equal(push(shared, *other), push(new_cache(), *other))
    assert shared.table.num_pages - len(shared.table.free) == 6


def test_select_by_indices_and_by_mask():
    cache, other = new_cache(), new_cache()
    key, value = tokens(4, 18)
    push(cache, key, value)
    push(other, key, value)
    cache.batch_select_indices(torch.tensor([True, False, False, True]))
    other.batch_select_indices([0, 3])
    assert same(cache, other)
    assert cache.batch_size == 2


def test_reset_keeps_memory_and_takes_another_batch():
    cache = new_cache()
    push(cache, *tokens(4, 100))
    pages = cache.memory_footprint()
    cache.reset()
    assert cache.get_seq_length() == 0
    push(cache, *tokens(2, 30))
    fresh = new_cache()
    push(fresh, *tokens(2, 30))
    assert same(cache, fresh)
    assert cache.memory_footprint() == pages


@pytest.mark.parametrize("size", [{}, {"max_batch": 4, "max_length": 64}], ids=["growing", "static"])
@pytest.mark.parametrize("batch", [2, 4])
def test_another_batch_than_the_one_held_is_refused(size, batch):
    cache, fresh = new_cache(**size), new_cache(**size)
    push(cache, *tokens(3, 10))
    for count in (1, 5):
        with pytest.raises(ValueError, match=f"holds 3 rows and got a batch of {batch}"):
            push(cache, *tokens(batch, count))
    assert cache.batch_size == 3
    push(fresh, *tokens(3, 10))
    assert torch.equal(push(cache, *tokens(3, 1, 4)), push(fresh, *tokens(3, 1, 4)))
    cache.reset()
    push(cache, *tokens(batch, 5))


def test_deepcopy_is_independent():
    cache = new_cache()
    push(cache, *tokens(2, 20))
    twin = copy.deepcopy(cache)
    push(twin, *tokens(2, 1, 4))
    assert (cache.get_seq_length(), twin.get_seq_length()) == (20, 21)
    fresh = new_cache()
    push(fresh, *tokens(2, 20))
    assert same(cache, fresh)


def test_offloaded_cache_gives_the_same(monkeypatch):
    plain, away = new_cache(), new_cache(offloading=True)
    moved = []
    monkeypatch.setattr(type(away.layers[0]), "offload", lambda layer: moved.append(layer))
    for step, count in enumerate((20, 1, 30)):
        assert torch.equal(push(plain, *tokens(2, count, step)), push(away, *tokens(2, count, step)))
    assert len(moved) == 3 * LAYERS


def test_static_equals_growing_in_every_kind_of_step():
    static, growing = new_cache(max_batch=2, max_length=128), new_cache()
    for step, count in enumerate((20, 1, 1, 7, 30, 1)):
        args = tokens(2, count, step)
        torch.testing.assert_close(push(static, *args), push(growing, *args), rtol=1e-6, atol=1e-6)
    assert same(static, growing)
    pool = static.layers[0].pool
    static.reset()
    push(static, *tokens(2, 5))
    assert static.layers[0].pool is pool


def test_quantized_prefill_reads_the_codes():
    key, value = tokens(2, 24)
    exact, rounded = new_cache(key_bits=2, value_bits=2), new_cache(key_bits=2, value_bits=2, prefill="quantized")
    a, b = push(exact, key, value), push(rounded, key, value)
    assert same(exact, rounded)
    assert not torch.allclose(a, b, atol=1e-3)
    query = torch.cat([key, value], 1)
    simulated = rounded.format.simulate(key, value)
    expected = torch.nn.functional.scaled_dot_product_attention(
        rounded.format.rotate_heads(query), *simulated, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(b[0], expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("key_bits", "value_bits"), [(2, 8), (3, 4), (4, 2), (8, 16), (16, 4)])
def test_keys_and_values_have_their_own_bits(key_bits, value_bits):
    cache = new_cache(key_bits=key_bits, value_bits=value_bits, key_clip=1.0, value_clip=1.0, rotate=False)
    key, value = (x.half() for x in tokens(2, 20))
    push(cache, key, value)
    got_key, got_value = stored(cache)[0].view(20, 2, HEADS, DIM).unbind(1)
    for got, x, bits in ((got_key, key, key_bits), (got_value, value, value_bits)):
        x = x[0].transpose(0, 1).float()
        step = 0 if bits == 16 else (x.amax(-1) - x.amin(-1)) / (2**bits - 1)
        assert ((got.float() - x).abs().amax(-1) <= 0.51 * step + 2e-3).all()


def test_failure_leaves_the_cache_usable():
    cache, fresh = new_cache(), new_cache()
    key, value = tokens(4, 21)
    push(cache, key, value)
    cache.reorder_cache(torch.tensor([1, 1, 2, 3]))
    more = tokens(4, 1, 5)
    handles = cache.update(*more, 0)
    query = torch.cat(more, dim=1)
    quarot_attention(Attention(), query, *handles, None)
    handles = cache.update(*more, 1)
    with pytest.raises(ValueError, match="heads"):
        quarot_attention(Attention(), torch.cat([query, query[:, :1]], 1), *handles, None)
    assert cache.get_seq_length() == 21
    push(cache, *more)
    push(fresh, key[[1, 1, 2, 3]], value[[1, 1, 2, 3]])
    push(fresh, *more)
    assert same(cache, fresh)


def test_out_of_memory_leaves_the_cache_usable(monkeypatch):
    cache, fresh = new_cache(), new_cache()
    key, value = tokens(2, 16)
    push(cache, key, value)
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
            push(cache, *tokens(2, 100, 4))
    assert cache.get_seq_length() == 16
    monkeypatch.undo()
    push(cache, *tokens(2, 3, 5))
    push(fresh, key, value)
    push(fresh, *tokens(2, 3, 5))
    assert same(cache, fresh)


def test_errors_say_what_does_not_fit():
    cache = new_cache()
    push(cache, *tokens(2, 5))
    with pytest.raises(ValueError, match="2 rows and got a batch of 3"):
        push(cache, *tokens(3, 1))
    with pytest.raises(ValueError, match="2 kv heads of 32"):
        cache.update(*tokens(2, 1, heads=4), 0)
    with pytest.raises(ValueError, match="float16"):
        cache.update(*(x.half() for x in tokens(2, 1)), 0)
    with pytest.raises(ValueError, match="max_batch and max_length"):
        new_cache(max_batch=2)
    with pytest.raises(ValueError, match="page_size 24"):
        new_cache(page_size=24)
    with pytest.raises(ValueError, match="3 rows of 17 tokens"):
        push(new_cache(max_batch=2, max_length=16), *tokens(3, 17))
    with pytest.raises(AttributeError, match="set_attn_implementation"):
        _ = cache.update(*tokens(2, 1), 0)[0].shape
    with pytest.raises(ValueError, match="for 2 layers was given to a model with more"):
        cache.update(*tokens(2, 1), LAYERS)
    for wrong in (2.5, "3", None):
        with pytest.raises(ValueError, match=r"crop\(.*\): the number of tokens must be an int"):
            cache.crop(wrong)
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match=r"batch_repeat_interleave\("):
            cache.batch_repeat_interleave(wrong)
    fixed = new_cache(max_batch=3, max_length=16)
    push(fixed, *tokens(2, 5))
    for wrong in ([5, 0], [-1, 0], [0.0, 1.0], [2, 0]):
        for one in (cache, fixed):
            with pytest.raises(ValueError, match=r"holds 2 rows, and row (5|-1|0\.0|2) was asked for"):
                one.reorder_cache(torch.tensor(wrong))
    with pytest.raises(ValueError, match=r"QuantKVCache\(model\.config\), not Attention\(\)"):
        QuantKVCache(Attention())
    push(cache, *tokens(2, 1))
    assert cache.get_seq_length() == 6
    cache.crop(torch.tensor(-2))  # as assisted generation does
    assert cache.get_seq_length() == 4


def test_memory_and_repr():
    cache = QuantKVCache(CONFIG, page_size=64)
    push(cache, *tokens(1, 64))
    per_token = 2 * (DIM * 4 // 8 + 4)
    assert cache.layers[0].layout.bytes_per_token == per_token
    assert cache.memory_footprint() % (64 * HEADS * per_token) == 0
    assert "key_bits=4" in repr(cache)
    assert "tokens=64" in repr(cache)


def test_decoding_past_a_fixed_size_is_refused():
    cache = new_cache(max_batch=1, max_length=5)
    table = cache.table
    table.append(1, 4, None, torch.device("cpu"))
    table.append(1, 1, None, torch.device("cpu"))
    with pytest.raises(ValueError, match="5 tokens and got 1 rows of 1 tokens after 5"):
        table.append(1, 1, None, torch.device("cpu"))
    cache.crop(-2)
    table.append(1, 1, None, torch.device("cpu"))
    cache.reset()
    table.append(1, 5, None, torch.device("cpu"))


def dense_chunk(cache, query, key, value, past, lengths, valid, window):
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
        score = (rotated @ keys.transpose(1, 2) * DIM**-0.5).masked_fill(hidden, -torch.inf)
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
def test_chunk_over_a_past_equals_dense_attention(path, padding, window, static, monkeypatch):
    monkeypatch.setattr(QuantKVLayer, "PACKED_ROWS", 1000 if path == "packed" else 0)
    monkeypatch.setattr(QuantKVLayer, "BLOCK_ELEMENTS", 0)
    monkeypatch.setattr(QuantKVLayer, "LEAST_BLOCK", 16 if path == "blocks" else 1000)
    cache = new_cache(**({"max_batch": 3, "max_length": 96} if static else {}))
    first, valid = torch.ones(3, 40, dtype=torch.bool), None
    if padding != "none":
        first = torch.arange(40) >= torch.tensor([0, 11, 40])[:, None]  # the last row is all padding so far
        valid = torch.arange(24) >= torch.tensor([0, 0, 5])[:, None]
        if padding == "middle":
            valid[1, 6:9] = False
    push(cache, *tokens(3, 40), None if padding == "none" else left_mask(first))
    lengths = first.sum(1).tolist()
    past = gathered(cache.layers[0], cache, lengths)
    key, value = tokens(3, 24, 5)
    query = torch.randn(3, 2 * HEADS, 24, DIM, generator=torch.Generator().manual_seed(6))
    handles = cache.update(key, value, 0)
    mask = None if valid is None else left_mask(valid)
    if valid is not None and window:
        rank = valid.cumsum(1)
        mask = mask & (rank[:, None, None, :] > rank[:, None, :, None] - window)
    out, _ = quarot_attention(Attention(), query, *handles, mask, sliding_window=window or None)
    expected = dense_chunk(cache, query, key, value, past, lengths, valid, window)
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
def test_memory_of_a_chunk_does_not_grow_with_the_past(padded, window, monkeypatch):
    monkeypatch.setattr(QuantKVLayer, "PACKED_ROWS", 0)
    monkeypatch.setattr(QuantKVLayer, "BLOCK_ELEMENTS", 0)
    monkeypatch.setattr(QuantKVLayer, "LEAST_BLOCK", 64)
    most = []
    for past in (256, 2048):
        cache = new_cache(reserve=past + 32)
        push(cache, *tokens(2, past))
        key, value = tokens(2, 32, 1)
        mask = left_mask(torch.arange(32) >= torch.tensor([0, 3])[:, None]) if padded else None
        handles = cache.update(key, value, 0)
        pools = {layer.pool.untyped_storage().data_ptr() for layer in cache.layers}
        with LargestTensor(pools) as largest:
            quarot_attention(Attention(), torch.cat([key, value], 1), *handles, mask, sliding_window=window or None)
        most.append(largest.most)
    assert most[0] == most[1]


def test_layers_look_up_the_past_once(monkeypatch):
    monkeypatch.setattr(QuantKVLayer, "PACKED_ROWS", 0)
    looked, find = [], QuantKVLayer._find_block
    monkeypatch.setattr(QuantKVLayer, "_find_block", lambda layer, *args: looked.append(layer) or find(layer, *args))
    cache = new_cache()
    push(cache, *tokens(2, 40))
    for step in range(2):
        push(cache, *tokens(2, 20, step))
    assert looked == [cache.layers[0]] * 2


class FakeBuffer:
    """Memory that grows in place, as csrc/memory gives on a GPU."""

    def __init__(self, device):
        self.memory = torch.zeros(1 << 20, dtype=torch.uint8, device=device)

    def tensor(self, nbytes):
        return self.memory[:nbytes]


def test_a_growing_pool_moves_once_where_memory_can_grow(monkeypatch):
    monkeypatch.setattr("quarot.nn.quant_kv_layer.step_bytes", lambda device: 4096)
    monkeypatch.setattr("quarot.nn.quant_kv_layer.GrowingBuffer", FakeBuffer)
    cache, fresh = new_cache(), new_cache(reserve=400)
    key, value = tokens(2, 300)
    push(cache, key[:, :, :100], value[:, :, :100])
    assert cache.layers[0].buffer is None
    push(cache, key[:, :, 100:150], value[:, :, 100:150])
    places = [layer.pool.data_ptr() for layer in cache.layers]
    pages = cache.layers[0].pool.shape[0]
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", lambda *args: pytest.fail("the past was copied"))
        push(cache, key[:, :, 150:], value[:, :, 150:])
    assert cache.layers[0].pool.shape[0] > pages
    assert [layer.pool.data_ptr() for layer in cache.layers] == places
    push(fresh, key, value)
    assert same(cache, fresh)
    assert fresh.layers[0].buffer is None  # what was reserved needs no growing


def test_a_copy_of_a_growing_buffer_is_no_buffer():
    assert copy.deepcopy(GrowingBuffer.__new__(GrowingBuffer)) is None
