"""The packed cache on its own: rows, pages, sharing. A changed cache equals one built afresh, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch

from quarot import QuantKVCache


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33, 64])
@pytest.mark.parametrize("more", [1, 2, 5, 20])
def test_append_to_any_length_equals_one_append(kv, length, more):
    key, value = kv.tokens(2, length + more)
    whole, parts = kv.new(), kv.new()
    kv.push(whole, key, value)
    kv.push(parts, key[:, :, :length], value[:, :, :length])
    kv.push(parts, key[:, :, length:], value[:, :, length:])
    assert parts.get_seq_length() == length + more
    assert kv.same(whole, parts)


@pytest.mark.parametrize("static", [False, True])
def test_padding_is_not_stored(kv, static):
    size = {"max_batch": 3, "max_length": 64} if static else {}
    cache = kv.new(**size)
    key, value = kv.tokens(3, 17)
    valid = torch.arange(17)[None] >= torch.tensor([0, 6, 16])[:, None]
    out = kv.push(cache, key, value, kv.left_mask(valid))
    assert cache.table.lengths.tolist() == [17, 11, 1]
    decoded = kv.push(cache, *kv.tokens(3, 1, 7))
    for row, skip in enumerate([0, 6, 16]):
        alone = kv.new()
        own = kv.push(alone, key[row : row + 1, :, skip:], value[row : row + 1, :, skip:])
        torch.testing.assert_close(out[:, row, skip:], own[:, 0], rtol=1e-5, atol=1e-5)
        one = tuple(x[row : row + 1] for x in kv.tokens(3, 1, 7))
        torch.testing.assert_close(decoded[:, row], kv.push(alone, *one)[:, 0], rtol=1e-5, atol=1e-5)
        assert torch.equal(kv.stored(cache)[row], kv.stored(alone)[0])


def test_padding_in_the_middle_and_crop_across_it(kv):
    cache, fresh = kv.new(), kv.new()
    key, value = kv.tokens(2, 40)
    valid = torch.ones(2, 40, dtype=torch.bool)
    valid[0, :5] = valid[1, 18:24] = False
    for start, stop in ((0, 18), (18, 40)):
        part = slice(start, stop)
        kv.push(cache, key[:, :, part], value[:, :, part], kv.left_mask(valid[:, part]))
    assert cache.table.lengths.tolist() == [35, 34]
    cache.crop(-20)
    kv.push(fresh, key[:, :, :18], value[:, :, :18], kv.left_mask(valid[:, :18]))
    kv.push(fresh, key[:, :, 18:20], value[:, :, 18:20], kv.left_mask(valid[:, 18:20]))
    assert cache.table.lengths.tolist() == [15, 18]
    assert kv.same(cache, fresh)


@pytest.mark.parametrize("static", [False, True])
def test_crop_and_regrow_equals_fresh(kv, static):
    size = {"max_batch": 2, "max_length": 96} if static else {}
    cache, fresh = kv.new(**size), kv.new(**size)
    key, value = kv.tokens(2, 50)
    kv.push(cache, key, value)
    cache.crop(-13)
    assert int(cache.get_seq_length()) == 37
    kv.push(cache, *kv.tokens(2, 30, 5))
    kv.push(fresh, key[:, :, :37], value[:, :, :37])
    kv.push(fresh, *kv.tokens(2, 30, 5))
    assert kv.same(cache, fresh)
    cache.crop(20)
    assert int(cache.get_seq_length()) == 20
    cache.crop(0)
    assert int(cache.get_seq_length()) == 20
    cache.crop(-100)
    assert int(cache.get_seq_length()) == 0


@pytest.mark.parametrize("static", [False, True])
def test_reorder_then_append(kv, static):
    size = {"max_batch": 4, "max_length": 64} if static else {}
    cache, fresh = kv.new(**size), kv.new(**size)
    key, value = kv.tokens(4, 21)
    order = torch.tensor([2, 2, 0, 3])
    kv.push(cache, key, value)
    cache.reorder_cache(order)
    kv.push(cache, *kv.tokens(4, 1, 9))
    kv.push(fresh, key[order], value[order])
    kv.push(fresh, *kv.tokens(4, 1, 9))
    assert kv.same(cache, fresh)


def test_repeated_rows_share_pages_until_they_write(kv):
    cache = kv.new()
    key, value = kv.tokens(1, 70)
    kv.push(cache, key, value)
    used = cache.table.num_pages - len(cache.table.free)
    cache.batch_repeat_interleave(8)
    assert cache.table.num_pages - len(cache.table.free) == used
    kv.push(cache, *kv.tokens(8, 1, 3))
    assert cache.table.num_pages - len(cache.table.free) == used + 7  # each row copied the last page, one kept it
    fresh = kv.new()
    kv.push(fresh, key.expand(8, -1, -1, -1), value.expand(8, -1, -1, -1))
    kv.push(fresh, *kv.tokens(8, 1, 3))
    assert kv.same(cache, fresh)
    cache.batch_select_indices(torch.tensor([0]))
    assert cache.table.num_pages - len(cache.table.free) == used


def test_equal_prompts_are_stored_once(kv):
    key, value = (x.repeat_interleave(3, 0) for x in kv.tokens(2, 37))
    valid = (torch.arange(37) >= torch.tensor([0, 0, 0, 20, 20, 20])[:, None]).clone()
    shared, fresh = kv.new(), kv.new()
    shared._expect_repeats(3)
    out = kv.push(shared, key, value, kv.left_mask(valid))
    assert torch.equal(out, kv.push(fresh, key, value, kv.left_mask(valid)))
    assert shared.table.num_pages - len(shared.table.free) == 3 + 2
    assert kv.same(shared, fresh)
    more = kv.tokens(6, 1, 8)
    assert torch.equal(kv.push(shared, *more), kv.push(fresh, *more))
    assert kv.same(shared, fresh)
    shared.reset()
    assert len(shared.table.free) == shared.table.num_pages
    other = kv.tokens(6, 5, 9)  # another prompt, of rows that differ
    assert torch.equal(kv.push(shared, *other), kv.push(kv.new(), *other))
    assert shared.table.num_pages - len(shared.table.free) == 6


def test_select_by_indices_and_by_mask(kv):
    cache, other = kv.new(), kv.new()
    key, value = kv.tokens(4, 18)
    kv.push(cache, key, value)
    kv.push(other, key, value)
    cache.batch_select_indices(torch.tensor([True, False, False, True]))
    other.batch_select_indices([0, 3])
    assert kv.same(cache, other)
    assert cache.batch_size == 2


@pytest.mark.parametrize("size", [{}, {"max_batch": 4, "max_length": 64}], ids=["growing", "static"])
@pytest.mark.parametrize("batch", [2, 4])
def test_another_batch_than_the_one_held_is_refused(kv, size, batch):
    cache, fresh = kv.new(**size), kv.new(**size)
    kv.push(cache, *kv.tokens(3, 10))
    for count in (1, 5):
        with pytest.raises(ValueError, match=f"holds 3 rows and got a batch of {batch}"):
            kv.push(cache, *kv.tokens(batch, count))
    assert cache.batch_size == 3
    kv.push(fresh, *kv.tokens(3, 10))
    assert torch.equal(kv.push(cache, *kv.tokens(3, 1, 4)), kv.push(fresh, *kv.tokens(3, 1, 4)))
    cache.reset()
    kv.push(cache, *kv.tokens(batch, 5))


def test_deepcopy_is_independent(kv):
    cache = kv.new()
    kv.push(cache, *kv.tokens(2, 20))
    twin = copy.deepcopy(cache)
    kv.push(twin, *kv.tokens(2, 1, 4))
    assert (cache.get_seq_length(), twin.get_seq_length()) == (20, 21)
    fresh = kv.new()
    kv.push(fresh, *kv.tokens(2, 20))
    assert kv.same(cache, fresh)


def test_static_equals_growing_in_every_kind_of_step(kv):
    static, growing = kv.new(max_batch=2, max_length=128), kv.new()
    for step, count in enumerate((20, 1, 1, 7, 30, 1)):
        args = kv.tokens(2, count, step)
        torch.testing.assert_close(kv.push(static, *args), kv.push(growing, *args), rtol=1e-6, atol=1e-6)
    assert kv.same(static, growing)
    pool = static.layers[0].pool
    static.reset()
    kv.push(static, *kv.tokens(2, 5))
    assert static.layers[0].pool is pool


def test_quantized_prefill_reads_the_codes(kv):
    key, value = kv.tokens(2, 24)
    exact, rounded = kv.new(key_bits=2, value_bits=2), kv.new(key_bits=2, value_bits=2, prefill="quantized")
    a, b = kv.push(exact, key, value), kv.push(rounded, key, value)
    assert kv.same(exact, rounded)
    assert not torch.allclose(a, b, atol=1e-3)
    query = torch.cat([key, value], 1)
    simulated = rounded.format.simulate(key, value)
    expected = torch.nn.functional.scaled_dot_product_attention(
        rounded.format.rotate_heads(query), *simulated, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(b[0], expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("key_bits", "value_bits"), [(2, 8), (3, 4), (4, 2), (8, 16), (16, 4)])
def test_keys_and_values_have_their_own_bits(kv, key_bits, value_bits):
    cache = kv.new(key_bits=key_bits, value_bits=value_bits, key_clip=1.0, value_clip=1.0, rotate=False)
    key, value = (x.half() for x in kv.tokens(2, 20))
    kv.push(cache, key, value)
    got_key, got_value = kv.stored(cache)[0].view(20, 2, kv.HEADS, kv.DIM).unbind(1)
    for got, x, bits in ((got_key, key, key_bits), (got_value, value, value_bits)):
        x = x[0].transpose(0, 1).float()
        step = 0 if bits == 16 else (x.amax(-1) - x.amin(-1)) / (2**bits - 1)
        assert ((got.float() - x).abs().amax(-1) <= 0.51 * step + 2e-3).all()


def test_errors_say_what_does_not_fit(kv):
    cache = kv.new()
    kv.push(cache, *kv.tokens(2, 5))
    with pytest.raises(ValueError, match="2 rows and got a batch of 3"):
        kv.push(cache, *kv.tokens(3, 1))
    with pytest.raises(ValueError, match="2 kv heads of 32"):
        cache.update(*kv.tokens(2, 1, heads=4), 0)
    with pytest.raises(ValueError, match="float16"):
        cache.update(*(x.half() for x in kv.tokens(2, 1)), 0)
    with pytest.raises(ValueError, match="max_batch and max_length"):
        kv.new(max_batch=2)
    with pytest.raises(ValueError, match="page_size 24"):
        kv.new(page_size=24)
    with pytest.raises(ValueError, match="3 rows of 17 tokens"):
        kv.push(kv.new(max_batch=2, max_length=16), *kv.tokens(3, 17))
    with pytest.raises(AttributeError, match="set_attn_implementation"):
        _ = cache.update(*kv.tokens(2, 1), 0)[0].shape
    with pytest.raises(ValueError, match="for 2 layers was given to a model with more"):
        cache.update(*kv.tokens(2, 1), kv.LAYERS)
    for wrong in (2.5, "3", None):
        with pytest.raises(ValueError, match=r"crop\(.*\): the number of tokens must be an int"):
            cache.crop(wrong)
    for wrong in (0, -1, 1.5):
        with pytest.raises(ValueError, match=r"batch_repeat_interleave\("):
            cache.batch_repeat_interleave(wrong)
    fixed = kv.new(max_batch=3, max_length=16)
    kv.push(fixed, *kv.tokens(2, 5))
    for wrong in ([5, 0], [-1, 0], [0.0, 1.0], [2, 0]):
        for one in (cache, fixed):
            with pytest.raises(ValueError, match=r"holds 2 rows, and row (5|-1|0\.0|2) was asked for"):
                one.reorder_cache(torch.tensor(wrong))
    with pytest.raises(ValueError, match=r"QuantKVCache\(model\.config\), not Attention\(\)"):
        QuantKVCache(kv.Attention())
    kv.push(cache, *kv.tokens(2, 1))
    assert cache.get_seq_length() == 6
    cache.crop(torch.tensor(-2))  # as assisted generation does
    assert cache.get_seq_length() == 4


def test_decoding_past_a_fixed_size_is_refused(kv):
    cache = kv.new(max_batch=1, max_length=5)
    table = cache.table
    table.append(1, 4, None, torch.device("cpu"))
    table.append(1, 1, None, torch.device("cpu"))
    with pytest.raises(ValueError, match="5 tokens and got 1 rows of 1 tokens after 5"):
        table.append(1, 1, None, torch.device("cpu"))
    cache.crop(-2)
    table.append(1, 1, None, torch.device("cpu"))
    cache.reset()
    table.append(1, 5, None, torch.device("cpu"))
