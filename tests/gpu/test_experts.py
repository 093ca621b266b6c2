"""Mixtures of experts on a GPU: integer experts compute what the reference does, calibrate, and meet a bit budget."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import quarot
from quarot.architectures import linear_modules
from quarot.nn.expert_list import ExpertList
from quarot.nn.quant_linear import QuantLinear
from quarot.ops.expert_sum import expert_sum
from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model
from quarot.runtime import fused_decoder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

WINDOWS = torch.randint(3, 24, (16, 64), generator=torch.Generator().manual_seed(7))


def _lists(model: Any) -> list[ExpertList]:
    return [m for m in model.modules() if isinstance(m, ExpertList)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [{}, {"a_bits": 8}, {"w_bits": 8, "a_bits": 8}])
def test_experts_are_those_of_the_cpu(
    moe_family: str, bits: dict[str, Any], dtype: torch.dtype, tiny_model: Callable[..., Any]
) -> None:
    """Of most tokens: a code on a rounding boundary may differ by one after the Hadamard kernel."""
    model = tiny_model(moe_family, dtype=dtype)
    rotate_model(model, progress=False)
    quantize_model(model, w_method="rtn", progress=False, **bits)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(37)])
    x, share = torch.randn(37, 128, dtype=dtype), torch.rand(37, 2)
    for experts in _lists(model):
        assert experts.integer
        expected = experts(x, index, share)
        experts.cuda()
        found = experts(x.cuda(), index.cuda(), share.cuda())
        one = slice(5, 6)
        assert torch.equal(experts(x[one].cuda(), index[one].cuda(), share[one].cuda()), found[one])
        error = (found.cpu().float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
        assert error.median() < 0.01
        assert error.max() < 0.2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_gemm_for_all_experts_gives_the_bits_of_the_loop(
    dtype: torch.dtype, tiny_model: Callable[..., Any]
) -> None:
    """Whatever the number of tokens; recorded, where the host cannot look, and compiled in one piece."""
    model = tiny_model("mixtral", dtype=dtype)
    rotate_model(model, progress=False)
    experts = _lists(quantize_model(model, w_method="rtn", progress=False).cuda())[0]
    for tokens in (1, 3, 16, 128, 200, 300):
        index = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)]).cuda()
        x, share = torch.randn(tokens, 128, dtype=dtype, device="cuda"), torch.rand(tokens, 2, device="cuda")
        codes, scale = experts.gate_up[0].quantize_input(x)
        loop = expert_sum(experts._run_loop(codes, scale, index, dtype), share)
        assert torch.equal(expert_sum(experts._run_stacked(codes, scale, index, dtype), share), loop)
        assert torch.equal(experts(x, index, share), loop)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            recorded = experts(x, index, share)
        index.copy_(index.flip(0).roll(1, 1))
        recorded.fill_(torch.nan)
        graph.replay()
        assert torch.equal(recorded, experts(x, index, share))
    with torch.no_grad():
        few = (x[:3], index[:3], share[:3])
        assert torch.equal(torch.compile(experts, fullgraph=True, backend="eager")(*few), experts(*few))


def test_a_moved_model_joins_its_experts_again(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("qwen3_moe", dtype=torch.float16)
    rotate_model(model, progress=False)
    experts = _lists(quantize_model(model, w_method="rtn", progress=False).cuda())[0]
    arguments = torch.randn(3, 128, device="cuda").half(), torch.tensor([[0, 2]] * 3).cuda(), torch.rand(3, 2).cuda()
    expected, stored = experts(*arguments), {n: t.clone() for n, t in experts.state_dict().items()}
    joint = experts.gate_up[0].joint
    assert joint is not None and all(m.joint is joint for m in experts.gate_up)
    twin = copy.deepcopy(experts)
    for other in (twin, experts.cpu().cuda()):
        assert torch.equal(other(*arguments), expected)
        assert other.gate_up[3].joint.qweight.data_ptr() != joint.qweight.data_ptr()
    for name, tensor in experts.state_dict().items():
        assert torch.equal(tensor, stored[name]), name
    changed = {n: (t * 2 if n.endswith("scale") else t) for n, t in stored.items()}
    experts.load_state_dict(changed)
    assert not torch.equal(experts(*arguments), expected)
    experts.load_state_dict(stored, assign=True)
    assert torch.equal(experts(*arguments), expected)


def test_generate_records_a_mixture_of_experts(moe_family: str, tiny_model: Callable[..., Any]) -> None:
    """The tokens of the same step unrecorded."""
    model = tiny_model(moe_family, dtype=torch.float16)
    rotate_model(model, progress=False)
    model = quantize_model(model, w_method="rtn", a_bits=8, progress=False).cuda()
    for batch in (1, 3, 140):  # 140 rows of 2 experts take two launches
        prompt = torch.randint(3, 24, (batch, 9), generator=torch.Generator().manual_seed(3)).cuda()
        recorded = quarot.generate(model, prompt, max_new_tokens=12, eos_token_id=())
        graphs = model.model.quarot_fused.session.graphs
        assert graphs and all(graph.graph is not None for graph in graphs.values())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QUAROT_CUDA_GRAPHS", "0")
            assert torch.equal(quarot.generate(model, prompt, max_new_tokens=12, eos_token_id=()), recorded)


@torch.no_grad()
def test_fused_experts_are_the_models_own(moe_family: str, tiny_model: Callable[..., Any]) -> None:
    """In fp32: half precision rounds the norm in one of them, and codes differ all over."""
    model = tiny_model(moe_family, dtype=torch.float32)
    rotate_model(model, progress=False)
    model = quantize_model(model, w_method="rtn", a_bits=8, progress=False).cuda()
    fused = model(WINDOWS.cuda(), use_cache=False).logits
    fused_decoder.uninstall(model)
    own = model(WINDOWS.cuda(), use_cache=False).logits
    error = (fused - own).norm(dim=-1) / own.norm(dim=-1)
    assert error.median() < 0.01  # a code on a rounding edge, or a choice of experts, may flip


def test_gptq_of_experts_is_that_of_the_cpu(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("mixtral", num_local_experts=8, num_experts_per_tok=1)
    rotate_model(model, progress=False)
    away = quantize_model(copy.deepcopy(model), calibration=WINDOWS, device="cuda", progress=False)
    here = quantize_model(model, calibration=WINDOWS, progress=False)
    starved = here.config.quantization_config.starved_experts
    found = away.config.quantization_config.starved_experts
    first = ".layers.0."  # behind it a token at a boundary may take another expert
    assert {n: t for n, t in found.items() if first in n} == {n: t for n, t in starved.items() if first in n}
    pairs = zip(linear_modules(here), linear_modules(away), strict=True)
    for (name, a, role), (_, b, _) in pairs:
        if role.startswith("expert") and first in name:
            assert (a.codes() != b.codes().cpu()).float().mean() < 0.06, name  # errors of one column move to all others


def test_a_budget_is_spent_as_on_the_cpu(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    rotate_model(model, progress=False)
    fields: dict[str, Any] = {"w_bits_budget": 4.5, "w_bits_choices": [4, 8], "w_method": "rtn", "a_bits": 8}
    here = quantize_model(copy.deepcopy(model), calibration=WINDOWS, progress=False, **fields)
    away = quantize_model(model.cuda(), calibration=WINDOWS, progress=False, **fields)
    bits = [[m.w_bits for _, m, _ in linear_modules(x) if isinstance(m, QuantLinear)] for x in (here, away)]
    assert bits[0] == bits[1]
    assert set(bits[0]) == {4, 8}
    with torch.no_grad():
        assert away(WINDOWS[:1].cuda()).logits.isfinite().all()
