"""``ExpertList`` on integer experts: shared quantisers compute what the experts compute one by one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import quarot
from quarot.nn.expert_list import ExpertList
from quarot.ops.expert_sum import expert_sum
from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model


def _quantized(family: str, tiny_model: Callable[..., Any], **fields: Any) -> tuple[Any, list[ExpertList]]:
    model = tiny_model(family)
    rotate_model(model, progress=False)
    quantize_model(model, **{"w_method": "rtn", "progress": False, **fields})
    return model, [m for m in model.modules() if isinstance(m, ExpertList)]


def _routed(tokens: int, experts: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)])
    return torch.randn(tokens, 128), index, torch.rand(tokens, k)


@pytest.mark.parametrize("bits", [{"a_bits": 4}, {"a_bits": 8, "w_bits": 8}, {"w_bits": 3}, {"w_symmetric": False}])
def test_shared_quantisers_are_those_of_each_expert(
    moe_family: str, bits: dict[str, Any], tiny_model: Callable[..., Any]
) -> None:
    """In fp32 the two ways agree bit for bit: the fused op rounds nothing between SiLU and the Hadamard transform."""
    _, lists = _quantized(moe_family, tiny_model, **bits)
    for experts in lists:
        assert experts.integer
        arguments = _routed(13, 4, 2)
        shared = experts(*arguments)
        experts.integer = False
        assert torch.equal(experts(*arguments), shared)


def test_a_token_does_not_see_its_neighbours(tiny_model: Callable[..., Any]) -> None:
    _, lists = _quantized("mixtral", tiny_model)
    x, index, share = _routed(13, 4, 2)
    together = lists[0](x, index, share)
    for token in range(13):
        row = slice(token, token + 1)
        assert torch.equal(lists[0](x[row], index[row], share[row]), together[row])


@pytest.mark.parametrize(
    "fields",
    [
        {"a_bits": 16},
        {"a_group_size": 32},
        {"overrides": {r".*experts\.down\.2": {"a_bits": 8}}},
        {"overrides": {r".*experts\.gate_up\.1": {"w_bits": 16, "a_bits": 16}}},
    ],
)
def test_experts_that_differ_run_one_by_one(fields: dict[str, Any], tiny_model: Callable[..., Any]) -> None:
    model, lists = _quantized("mixtral", tiny_model, **fields)
    assert not any(experts.integer for experts in lists)
    assert model(torch.tensor([[5, 9, 11]])).logits.isfinite().all()


def test_a_hook_on_an_expert_is_called(tiny_model: Callable[..., Any]) -> None:
    _, lists = _quantized("mixtral", tiny_model)
    calls: list[int] = []
    lists[0].down[1].register_forward_hook(lambda *_: calls.append(1))
    lists[0](*_routed(13, 4, 2))
    assert calls == [1]


def test_a_replaced_expert_counts(tiny_model: Callable[..., Any]) -> None:
    _, lists = _quantized("mixtral", tiny_model)
    (experts, other), calls = lists, []
    assert experts.stacks is not None
    for index, layer in ((1, other.down[1]), (3, torch.nn.Linear(192, 128))):
        layer.register_forward_hook(lambda *_: calls.append(1))
        experts.down[index] = layer
        experts(*_routed(13, 4, 2))
        assert calls
        calls.clear()
        if experts.integer:
            assert experts.stacks[1].members[index] is layer
    assert experts.stacks is None


def test_only_experts_with_tokens_run(tiny_model: Callable[..., Any]) -> None:
    _, lists = _quantized("mixtral", tiny_model)
    x, _, share = _routed(5, 4, 2)
    index = torch.tensor([[0, 2]]).expand(5, 2)
    expected = lists[0](x, index, share)
    for idle in (1, 3):
        lists[0].gate_up[idle].forward_codes = lists[0].down[idle].forward_codes = None  # a call would fail
    assert torch.equal(lists[0](x, index, share), expected)


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_joined_experts_are_the_loop(tokens: int, moe_family: str, tiny_model: Callable[..., Any]) -> None:
    """And their parameters, views now, are what they were; a copy joins nothing of the original."""
    _, lists = _quantized(moe_family, tiny_model)
    experts, (x, index, share) = lists[0], _routed(tokens, 4, 2)
    expected, stored = experts(x, index, share), {n: t.clone() for n, t in experts.state_dict().items()}
    assert not any(m.joint for m in experts.down)  # only a GPU reads them joined
    for one in (experts, copy.deepcopy(experts)):
        codes = one.gate_up[0].quantize_input(x)
        assert torch.equal(expert_sum(one._run_stacked(*codes, index, x.dtype), share), expected)
        assert one.stacks[0].tensors()[0].data_ptr() == one.gate_up[0].qweight.data_ptr()
        for name, tensor in one.state_dict().items():
            assert torch.equal(tensor, stored[name]), name
    assert one.gate_up[0].qweight.data_ptr() != experts.gate_up[0].qweight.data_ptr()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"w_symmetric": False}, "no GEMM for many experts with .*asym"),
        ({"w_bits": 8}, "no GEMM for many experts with .*w8"),
        ({"w_group_size": 32}, "groups of 32"),
        ({"a_bits": 16}, "do not share quantisers"),
    ],
)
def test_what_cannot_be_joined_says_so(fields: dict[str, Any], reason: str, tiny_model: Callable[..., Any]) -> None:
    model, lists = _quantized("mixtral", tiny_model, **fields)
    assert re.search(reason, lists[0].obstacle() or "")
    with pytest.raises(NotImplementedError, match=r"fused decoder path"):
        quarot.generate(model, torch.tensor([[5, 9]]), max_new_tokens=1)
