"""Rotation changes nothing: every family, every subset of rotations, in float64 and to 1e-10."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from quarot.architectures import architecture_of, decoder_layers, linear_modules
from quarot.nn.rotated_linear import RotatedLinear
from quarot.ops.hadamard import hadamard_transform
from quarot.rotation.hadamard import block_hadamard_spec, hadamard_spec
from quarot.rotation.orthogonal import random_orthogonal
from quarot.rotation.plan import RotationPlan
from quarot.rotation.rotate import rotate_model

TOLERANCE = 1e-10


def rotate(model: nn.Module, **switches: Any) -> RotationPlan:
    return rotate_model(model, progress=False, **switches)


def use_r3(model: Any, plan: RotationPlan) -> None:
    """Rotate queries and keys after RoPE as a runtime with a quantised cache does; the rest of attention is sdpa."""

    def attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if plan.r3 is not None:
            query, key = hadamard_transform(query, plan.r3), hadamard_transform(key, plan.r3)
        return sdpa_attention_forward(module, query, key, *args, **kwargs)

    transformers.AttentionInterface.register("rotated_sdpa", attention)
    transformers.AttentionMaskInterface.register("rotated_sdpa", sdpa_mask)
    model.set_attn_implementation("rotated_sdpa")


@pytest.fixture
def change(exact_logits: Callable[..., torch.Tensor], token_ids: torch.Tensor) -> Callable[..., float]:
    """``change(model, **switches)``: rotates a float64 model and returns the relative change of its logits."""

    def measure(model: nn.Module, **switches: Any) -> float:
        before = exact_logits(copy.deepcopy(model), token_ids)
        plan = rotate(model, **switches)
        use_r3(model, plan)
        after = exact_logits(model, token_ids)
        return ((after - before).norm() / before.norm()).item()

    return measure


def test_all_rotations_together(family: str, tiny_model: Callable[..., Any], change: Callable[..., float]) -> None:
    model = tiny_model(family, dtype=torch.float64)
    assert change(model) < TOLERANCE
    record = architecture_of(model)
    for _, layer in decoder_layers(model):
        assert isinstance(layer.get_submodule(record.attn_out.path), RotatedLinear)
        assert isinstance(layer.get_submodule(record.mlp_out.path), RotatedLinear)


SUBSETS = list(
    itertools.product((None, "hadamard"), (True, False), ("heads", "full", "none"), (True, False), (True, False))
)


def test_every_subset_of_rotations(
    family: str, tiny_model: Callable[..., Any], exact_logits: Callable[..., torch.Tensor], token_ids: torch.Tensor
) -> None:
    original = tiny_model(family, dtype=torch.float64)
    before = exact_logits(original, token_ids)
    for r1, r2, o_proj_online, r3, r4 in SUBSETS:
        switches = {"r1": r1, "r2": r2, "o_proj_online": o_proj_online, "r3": r3, "r4": r4}
        model = tiny_model(family, dtype=torch.float64)
        use_r3(model, rotate(model, **switches))
        assert (exact_logits(model, token_ids) - before).norm() < TOLERANCE * before.norm(), switches


@pytest.mark.parametrize(("tie", "eps", "kv_heads"), [(True, 1e-2, 1), (False, 1e-2, 4), (True, 1e-6, 4)])
def test_ties_eps_and_grouped_heads(
    family: str, tie: bool, eps: float, kv_heads: int, tiny_model: Callable[..., Any], change: Callable[..., float]
) -> None:
    config = {"tie_word_embeddings": tie, "rms_norm_eps": eps, "num_key_value_heads": kv_heads}
    assert change(tiny_model(family, dtype=torch.float64, **config)) < TOLERANCE


@pytest.mark.parametrize("heads", [1, 3, 5, 6, 7, 9, 12, 14, 15, 20, 24, 25, 28, 40])
def test_head_counts(heads: int, tiny_model: Callable[..., Any], change: Callable[..., float]) -> None:
    config = {"num_attention_heads": heads, "head_dim": 16, "hidden_size": 16 * heads, "num_key_value_heads": 1}
    model = tiny_model("llama", dtype=torch.float64, **config)
    assert change(model) < TOLERANCE
    plan = model.quarot_rotation
    if hadamard_spec(16 * heads, inner=16):
        assert plan.notes == ()
        assert plan.attn_out_input is None if heads == 1 else plan.attn_out_input.inner == 16
    else:
        assert plan.attn_out_input == hadamard_spec(16 * heads)
        assert plan.r2_signs
        assert any(f"{heads} heads have no Hadamard matrix" in note for note in plan.notes)
        assert f"note: o_proj: {heads} heads" in plan.describe()


@pytest.mark.parametrize("head_dim", [10, 64, 80, 96, 128, 192, 256])
def test_head_dims(head_dim: int, tiny_model: Callable[..., Any], change: Callable[..., float]) -> None:
    model = tiny_model("llama", dtype=torch.float64, head_dim=head_dim)
    assert change(model) < TOLERANCE
    plan = model.quarot_rotation
    assert plan.r3 == hadamard_spec(head_dim)
    assert (plan.r3 is None) == any(note.startswith("R3: no Hadamard matrix of width 10") for note in plan.notes)
    assert plan.r2 == block_hadamard_spec(head_dim)


@pytest.mark.parametrize("intermediate", [144, 214, 107])
def test_widths_without_a_hadamard_matrix(
    intermediate: int, tiny_model: Callable[..., Any], change: Callable[..., float]
) -> None:
    model = tiny_model("llama", dtype=torch.float64, intermediate_size=intermediate)
    assert change(model) < TOLERANCE
    plan = model.quarot_rotation
    spec = block_hadamard_spec(intermediate)
    assert plan.mlp_out_input == (None if intermediate == 107 else spec)
    assert any("R4: no Hadamard matrix" in note for note in plan.notes) == (spec.blocks > 1)


def test_hidden_width_without_a_hadamard_matrix_gets_a_random_rotation(
    tiny_model: Callable[..., Any], change: Callable[..., float]
) -> None:
    model = tiny_model("llama", dtype=torch.float64, hidden_size=90, num_attention_heads=6)
    assert change(model) < TOLERANCE
    assert model.quarot_rotation.r1 == "orthogonal"
    assert any("R1: no Hadamard matrix of width 90" in note for note in model.quarot_rotation.notes)


def test_other_residual_rotations(family: str, tiny_model: Callable[..., Any], change: Callable[..., float]) -> None:
    for r1 in ("orthogonal", random_orthogonal(128, 5), random_orthogonal(128, 6).float()):
        limit = 1e-6 if isinstance(r1, torch.Tensor) and r1.dtype == torch.float32 else TOLERANCE
        assert change(tiny_model(family, dtype=torch.float64), r1=r1) < limit


def test_down_proj_block(tiny_model: Callable[..., Any], change: Callable[..., float]) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    assert change(model, down_proj_block=32) < TOLERANCE
    assert model.quarot_rotation.mlp_out_input.blocks == 6
    assert "R4: 6 blocks of H32, as asked for by down_proj_block=32" in model.quarot_rotation.notes


def test_embedding_mean_is_not_removed(tiny_model: Callable[..., Any], change: Callable[..., float]) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    with torch.no_grad():
        model.model.embed_tokens.weight += 0.5
    assert change(model) < TOLERANCE


def test_final_norm_is_folded_once(tiny_model: Callable[..., Any], change: Callable[..., float]) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    with torch.no_grad():
        model.model.norm.weight.normal_(3.0, 0.5)
    assert change(model) < TOLERANCE


def test_padded_batch_and_gemma_padding_row(
    tiny_model: Callable[..., Any], exact_logits: Callable[..., torch.Tensor]
) -> None:
    ids = torch.tensor([[0, 0, 5, 9, 11], [7, 8, 9, 10, 12]])
    mask = (ids != 0).long()
    model = tiny_model("gemma", dtype=torch.float64)
    before = exact_logits(copy.deepcopy(model), ids, attention_mask=mask)
    rotate(model)
    after = exact_logits(model, ids, attention_mask=mask)
    torch.testing.assert_close(after[mask.bool()], before[mask.bool()], rtol=1e-9, atol=1e-9)


def test_norms_become_exactly_neutral_and_head_norms_stay(family: str, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(family)
    head_norms = {n: p.clone() for n, p in model.named_parameters() if "q_norm" in n or "k_norm" in n}
    rotate(model)
    neutral = 0.0 if family == "gemma" else 1.0
    for name, parameter in model.named_parameters():
        if name in head_norms:
            assert torch.equal(parameter, head_norms[name])
        elif "norm" in name:
            assert torch.equal(parameter, torch.full_like(parameter, neutral)), name
    assert bool(head_norms) == (family == "qwen3")


def test_tied_head_is_untied_and_stays_so(tiny_model: Callable[..., Any], tmp_path: Any) -> None:
    model = tiny_model("smollm3")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    rotate(model, r3=False, r4=False, o_proj_online="none", record=False)
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert model.config.tie_word_embeddings is False
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_without_online_rotations_the_model_is_a_plain_one(family: str, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(family)
    names = set(model.state_dict())
    plan = rotate(model, r3=False, r4=False, o_proj_online="none", record=False)
    assert not plan.online
    assert all(type(module) is nn.Linear for _, module, _ in linear_modules(model))
    assert set(model.state_dict()) == names
    assert getattr(model.config, "quantization_config", None) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_models_are_rounded_once(dtype: torch.dtype, tiny_model: Callable[..., Any]) -> None:
    """Folding in float64 and casting back: bit-equal to rotating the widened model and casting that."""
    model, wide = tiny_model("llama", dtype=dtype), tiny_model("llama", dtype=dtype).double()
    rotate(model)
    rotate(wide)
    state = wide.state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, state[name].to(dtype)), name


def test_rotating_bf16_loses_no_more_than_bf16_itself(tiny_model: Callable[..., Any], token_ids: torch.Tensor) -> None:
    with torch.no_grad():
        exact = tiny_model("llama", dtype=torch.bfloat16).double()(token_ids).logits
        plain = tiny_model("llama", dtype=torch.bfloat16)
        before = plain(token_ids).logits
        rotate(plain)
        after = plain(token_ids).logits
    assert (after - exact).norm() <= 1.5 * (before - exact).norm()


def test_seed_decides_everything(tiny_model: Callable[..., Any]) -> None:
    def rotated(seed: int) -> dict[str, torch.Tensor]:
        model = tiny_model("llama", num_attention_heads=6, hidden_size=96)
        assert rotate(model, seed=seed).seed == seed
        return model.state_dict()

    first, again, other = rotated(1), rotated(1), rotated(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_outliers_disappear(tiny_model: Callable[..., Any], token_ids: torch.Tensor) -> None:
    model = tiny_model("llama")

    def peak() -> float:
        residual = model.model.embed_tokens(token_ids)
        return (residual.abs().amax(-1) / residual.square().mean(-1).sqrt()).mean().item()

    before = peak()
    rotate(model)
    assert peak() < before / 1.5


def test_plan_is_recorded_in_the_config(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    plan = rotate(model, seed=7)
    recorded = model.config.quantization_config
    assert recorded.w_bits == recorded.a_bits == recorded.k_bits == recorded.v_bits == 16
    assert RotationPlan.from_dict(recorded.rotation) == plan


def test_deepcopy_of_a_rotated_model_is_independent(
    tiny_model: Callable[..., Any], exact_logits: Callable[..., torch.Tensor], token_ids: torch.Tensor
) -> None:
    model = tiny_model("llama", dtype=torch.float64)
    rotate(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.rotated_weight.zero_()
    assert not torch.equal(exact_logits(twin, token_ids), exact_logits(model, token_ids))
