"""``ExpertList`` on integer experts: shared quantisers compute what the experts compute one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quarot.nn.expert_list import ExpertList
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


def test_only_experts_with_tokens_run(tiny_model: Callable[..., Any]) -> None:
    _, lists = _quantized("mixtral", tiny_model)
    x, _, share = _routed(5, 4, 2)
    index = torch.tensor([[0, 2]]).expand(5, 2)
    expected = lists[0](x, index, share)
    lists[0].gate_up[1] = lists[0].down[3] = None  # a call would fail
    lists[0].gate_up[3] = lists[0].down[1] = None
    assert torch.equal(lists[0](x, index, share), expected)
