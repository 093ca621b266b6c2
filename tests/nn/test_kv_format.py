"""The storage format: groups that fit every head, rounding errors within half a step, R3 that cancels."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from quarot import HadamardSpec, QuantKVCache, QuarotConfig
from quarot.nn.kv_format import KVFormat, dividing_group
from quarot.rotation.hadamard import hadamard_spec


@pytest.mark.parametrize(
    ("head_dim", "group", "expected"),
    [(128, 128, 128), (64, 128, 64), (96, 128, 96), (80, 64, 16), (192, 128, 96), (256, 128, 128), (96, 32, 32)],
)
def test_groups_divide_the_head(head_dim, group, expected):
    assert dividing_group(head_dim, group) == expected


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 4), (8, 3), (2, 8)])
def test_rounding_error_is_half_a_step(head_dim, group, key_bits, value_bits):
    kv_format = KVFormat(key_bits, value_bits, group, 1.0, 1.0, hadamard_spec(head_dim))
    key, value = torch.randn(2, 2, 3, 9, head_dim)
    got_key, got_value = kv_format.simulate(key, value)
    width = dividing_group(head_dim, group)
    for got, x, bits in ((got_key, kv_format.rotate_heads(key), key_bits), (got_value, value, value_bits)):
        groups = x.unflatten(-1, (-1, width))
        step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
        error = (got.unflatten(-1, (-1, width)) - groups).abs().amax(-1)
        assert (error <= 0.5 * step + 4e-3).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 192])
@pytest.mark.parametrize(("key_bits", "value_bits"), [(4, 4), (3, 2), (8, 16), (16, 8)])
def test_simulation_is_what_pages_give_back(dtype, head_dim, key_bits, value_bits):
    kv_format = KVFormat(key_bits, value_bits, 32, 0.95, 0.95, hadamard_spec(head_dim))
    key, value = torch.randn(2, 2, 3, 21, head_dim).to(dtype)
    for fast, paged in zip(kv_format.simulate(key, value), kv_format._through_pages(key, value), strict=True):
        assert fast.dtype == dtype
        assert torch.equal(fast, paged)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_rotation_of_keys_cancels_against_that_of_queries(head_dim):
    kv_format = KVFormat(8, 8, 128, 1.0, 1.0, hadamard_spec(head_dim))
    query, key, value = torch.randn(3, 1, 2, 7, head_dim)
    stored, _ = kv_format.simulate(key, value)
    scores = kv_format.rotate_heads(query) @ stored.transpose(-1, -2)
    expected = query @ key.transpose(-1, -2)
    assert (scores - expected).norm() < 0.02 * expected.norm()


def test_sixteen_bit_keys_are_not_rotated():
    assert KVFormat(16, 4, rotation=HadamardSpec(64, 1, 64)).rotate == (0, 0)
    assert KVFormat(4, 4, rotation=HadamardSpec(64, 1, 64)).rotate == (1, 64)


def test_rotation_of_another_width_is_refused():
    with pytest.raises(ValueError, match="head_dim of 32"):
        KVFormat(rotation=HadamardSpec(32, 1, 32)).layout(64)


def test_cache_takes_the_format_of_the_model_and_what_is_passed():
    config = LlamaConfig(num_attention_heads=2, head_dim=64, num_hidden_layers=1)
    assert QuantKVCache(config).format == KVFormat(4, 4, 128, 0.95, 0.95, HadamardSpec(64, 1, 64))
    config.quantization_config = QuarotConfig(k_bits=8, v_bits=3, kv_group_size=32, kv_clip=0.9).to_dict()
    assert QuantKVCache(config).format == KVFormat(8, 3, 32, 0.9, 0.9, None)
    changed = QuantKVCache(config, key_bits=2, group=64, rotate=True, key_clip=0.8).format
    assert changed == KVFormat(2, 3, 64, 0.8, 0.9, HadamardSpec(64, 1, 64))


def test_a_clip_ratio_left_at_its_default_follows_the_bits_of_the_layer():
    pairs = [[8, 8], [4, 8], [16, 16], [2, 2]]
    expected = [(1.0, 1.0), (0.95, 1.0), (1.0, 1.0), (0.95, 0.95)]
    mixed = QuarotConfig(kv_bits_by_layer=pairs)
    assert [KVFormat.from_config(mixed, layer).clips for layer in range(4)] == expected
    mixed = QuarotConfig(k_bits=8, v_bits=8, kv_bits_by_layer=pairs)
    assert [KVFormat.from_config(mixed, layer).clips for layer in range(4)] == expected
    assert KVFormat.from_config(mixed).clips == (1.0, 1.0)
    given = QuarotConfig(kv_clip=0.9, v_clip=0.8, kv_bits_by_layer=pairs)
    assert {KVFormat.from_config(given, layer).clips for layer in range(4)} == {(0.9, 0.8)}
    cache = QuantKVCache(LlamaConfig(num_hidden_layers=1), key_bits=8)
    assert cache.format.clips == (1.0, 0.95)


def test_a_cache_reads_the_configuration_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once a layer: one with overrides for every layer took half a minute a cache."""
    config = LlamaConfig(num_hidden_layers=6)
    config.quantization_config = QuarotConfig(kv_bits_by_layer=[[4, 8], [8, 2]] * 3).to_dict()
    made, check = [], QuarotConfig.__post_init__

    def counted(config: QuarotConfig) -> None:
        made.append(config)
        check(config)

    monkeypatch.setattr(QuarotConfig, "__post_init__", counted)
    formats = [layer.format for layer in QuantKVCache(config).layers]
    assert [(f.key_bits, f.value_bits) for f in formats] == [(4, 8), (8, 2)] * 3
    assert len(made) == 1


@pytest.mark.parametrize("bits", [(8, 4), (4, 8), (4, 4)])
def test_keys_and_values_are_clipped_each_by_its_own_ratio(bits: tuple[int, int]) -> None:
    """Twice through pages and once without: an outlier that one ratio cuts survives under the other."""
    x = torch.zeros(1, 1, 1, 32)
    x[..., 0], x[..., 1] = 1.0, -1.0
    kv_format = KVFormat(*bits)
    direct, paged = kv_format.simulate(x, x), kv_format._through_pages(x, x)
    for one, other, width in zip(direct, paged, bits, strict=True):
        assert torch.equal(one, other)
        assert one.max() == pytest.approx(1.0 if width == 8 else 0.95, rel=2e-3)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("key_bits", 5), ("value_bits", 4.0), ("group", -1), ("group", 0),
        ("key_clip", float("nan")), ("key_clip", -1.0), ("value_clip", 0.0), ("value_clip", 1.5),
        ("rotate", "no"), ("offloading", "yes"), ("page_size", "64"), ("page_size", 0), ("reserve", -1),
        ("max_batch", 0), ("max_length", -4),
    ],
)  # fmt: skip
def test_wrong_options_of_the_cache_are_refused_by_name(option: str, value: object) -> None:
    fixed = {"max_batch": 2, "max_length": 8} if option.startswith("max") else {}
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        QuantKVCache(LlamaConfig(num_hidden_layers=1), **(fixed | {option: value}))
