"""Quantised models have no gradient, and say so, instead of the one that happens to flow through their scales."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import quarot.ops
from quarot import quantize_model, rotate_model
from quarot.config import QuarotConfig
from quarot.nn.quant_linear import QuantLinear
from quarot.ops.hadamard import hadamard, transposed_hadamard
from quarot.quantization.rtn import quantize_rtn

for module in pkgutil.iter_modules(quarot.ops.__path__):  # defines all ops, whichever test runs first
    importlib.import_module(f"quarot.ops.{module.name}")

NOTHING: dict[str, Any] = {"w_bits": 16, "a_bits": 16, "k_bits": 16, "v_bits": 16}


@pytest.mark.parametrize("fields", [{}, {"a_group_size": 32}, {"a_bits": 8, "w_bits": 8}])
def test_a_quantised_layer_refuses_backward(fields: dict[str, Any]) -> None:
    config = QuarotConfig(**fields)
    linear = nn.Linear(64, 32)
    layer = QuantLinear.from_linear(linear, config, *quantize_rtn(linear.weight.detach(), config.w_bits))
    x = torch.randn(3, 64, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, layer(x.detach()))
    with pytest.raises(RuntimeError, match="QuantLinear has no gradient: quantised models are for inference"):
        y.sum().backward()


def test_unquantised_activations_have_a_gradient() -> None:
    linear = nn.Linear(64, 32)
    layer = QuantLinear.from_linear(linear, QuarotConfig(a_bits=16), *quantize_rtn(linear.weight.detach(), 4))
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantize().sum(0).expand(3, -1))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("fields", [{}, {**NOTHING, "k_bits": 4, "v_bits": 4}, {"k_bits": 16, "v_bits": 16}])
def test_a_quantised_model_refuses_backward(
    family: str, use_cache: bool, fields: dict[str, Any], tiny_model: Callable[..., Any], token_ids: torch.Tensor
) -> None:
    model = tiny_model(family)
    rotate_model(model, progress=False)
    quantize_model(model, w_method="rtn", progress=False, **fields)
    model.train()
    out = model(token_ids, labels=token_ids, use_cache=use_cache)
    with torch.no_grad():
        assert torch.equal(model(token_ids, use_cache=use_cache).logits, out.logits)
    with pytest.raises(RuntimeError, match="has no gradient"):
        out.loss.backward()


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("given", ["tokens", "embeddings"])
def test_a_fused_forward_refuses_backward(
    given: str, cache: bool, tiny_model: Callable[..., Any], token_ids: torch.Tensor
) -> None:
    """In evaluation mode: a loss must not reach the head alone, as if the rest had no gradient."""
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    quantize_model(model, w_method="rtn", progress=False)
    model.eval()
    embeddings = model.get_input_embeddings()(token_ids).detach().requires_grad_()
    inputs = {"input_ids": token_ids} if given == "tokens" else {"inputs_embeds": embeddings}
    out = model(**inputs, labels=token_ids, use_cache=cache)
    assert model.model.quarot_fused.obstacle((), inputs) is None
    with torch.no_grad():
        assert torch.equal(model(**inputs, use_cache=cache).logits, out.logits)
    with pytest.raises(RuntimeError, match="a quantised model has no gradient"):
        out.loss.backward()
    model.requires_grad_(False)
    assert not model(token_ids).logits.requires_grad


FLOAT = torch.tensor([[0.5, -1.0] * 32] * 2)
CODES = torch.ones(2, 64, dtype=torch.int8)
TILES = torch.zeros(1, 2, 256, dtype=torch.uint8)
SCALES = torch.ones(16)
CACHE = (torch.zeros(2, 1, 4, 1152, dtype=torch.uint8), 4, 4, 64, 64)
"""Pages of 64 tokens of one head of 64 channels, and what reads them."""

CALLS: dict[str, tuple[Any, ...]] = {
    "add_rms_norm": (FLOAT, None, 1e-6),
    "add_rms_norm_quantize": (FLOAT, None, 1e-6, 4, 0.9),
    "quantize_per_token": (FLOAT, 4, 0.9),
    "hadamard_quantize": (FLOAT, 1, 64, 1, 4, 0.9),
    "silu_mul_hadamard_quantize": (FLOAT, 1, 32, 4, 0.9),
    "float32_matmul": (FLOAT, FLOAT.T.contiguous()),
    "gemm_w4a4": (CODES, FLOAT[:, 0].contiguous(), TILES, SCALES, None, torch.float32),
    "gemm_w8a8": (CODES, FLOAT[:, 0].contiguous(), CODES, SCALES[:2], None, torch.float32),
    "expert_gemm_w4a4": (
        CODES, FLOAT[:, 0].contiguous(), torch.zeros(2, 1, dtype=torch.int64), TILES[None], SCALES[None], torch.float32
    ),
    "expert_route": (FLOAT, 2, True, torch.float32),
    "expert_sum": (FLOAT, torch.ones(1, 2)),
    "add_rms_norm_gemm_w4a4": (FLOAT, None, 1e-6, 4, 0.9, TILES, SCALES, None),
    "hadamard_gemm_w4a4": (FLOAT, 1, 2, 32, 4, 0.9, TILES, SCALES, None),
    "silu_mul_hadamard_gemm_w4a4": (FLOAT.repeat(1, 2), 1, 64, 4, 0.9, TILES, SCALES, None),
    "decode_attention": (
        FLOAT.view(2, 1, 1, 64), CACHE[0], torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.int32),
        *CACHE[1:], 0.125, 0, 0, 0,
    ),
    "merge_partials": (*(FLOAT.view(1, 1, 2, 64), torch.zeros(1, 1, 2)) * 2, torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_every_op_that_rounds_refuses_backward(name: str) -> None:
    args = [a.clone().requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in CALLS[name]]
    op = getattr(torch.ops.quarot, name)
    results, plain = op(*args), op(*CALLS[name])
    results, plain = (r if isinstance(r, tuple) else (r,) for r in (results, plain))
    assert all(torch.equal(a, b) for a, b in zip(results, plain, strict=True))
    for result in results:
        if result.is_floating_point():
            with pytest.raises(RuntimeError, match=f"quarot::{name} has no gradient"):
                result.sum().backward()


def test_an_op_that_works_in_place_refuses_what_wants_a_gradient() -> None:
    rope = torch.ops.quarot.rope
    tables = torch.ones(2, 64), torch.zeros(2, 64)
    qkv = (FLOAT.repeat(1, 3).requires_grad_() * 1).clone()
    with pytest.raises(RuntimeError, match=r"quarot::rope works in place .* torch.no_grad"):
        rope(qkv, *tables, 1, 1, 64, None, None, 1e-6)
    with torch.no_grad():
        rope(qkv, *tables, 1, 1, 64, None, None, 1e-6)


def test_every_op_was_looked_at() -> None:
    """A new op either has a gradient, refuses one above, or gives nothing that could have one."""
    ops = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("quarot::")}
    with_gradient = {"hadamard", "transposed_hadamard"}
    in_place = {"rope", "kv_append", "rope_kv_append", "begin_step"}
    without_floats_in = {"argmax_rows", "kv_gather"}
    assert {name.partition(".")[0] for name in ops} == {*CALLS, *with_gradient, *in_place, *without_floats_in}


@pytest.mark.parametrize(("order", "pow2", "inner"), [(12, 2, 1), (1, 64, 1), (20, 1, 3), (36, 1, 1), (1, 1, 1)])
def test_the_online_transform_has_its_gradient(order: int, pow2: int, inner: int) -> None:
    """As kernels need it, which nothing records; opcheck looks for the registration, gradcheck at the values."""
    shape, arguments = (3, 2 * order * pow2 * inner), (order, pow2, inner)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for op in (hadamard, transposed_hadamard):
        assert torch.autograd.gradcheck(lambda x, op=op: op(x, *arguments), (x,))
        assert torch.autograd.gradgradcheck(lambda x, op=op: op(x, *arguments), (x,))
        if order == 12:
            torch.library.opcheck(op, (torch.randn(shape, requires_grad=True), *arguments))
    torch.testing.assert_close(transposed_hadamard(hadamard(x, *arguments), *arguments), x)
    half = torch.randn(shape, dtype=torch.float16, requires_grad=True)
    hadamard(half, *arguments).sum().backward()
    assert half.grad is not None
    exact = transposed_hadamard(torch.ones(shape, dtype=torch.float64), *arguments)
    assert (half.grad - exact).abs().max() <= 1e-3 * exact.abs().max()
