"""Tiny random models of every supported family, built from their config classes: no download, milliseconds each.

Norm gains are drawn from uniform(0.5, 2) and biases from a normal: fresh ones (all 1, all 0) hide folding errors;
three columns of the embedding are 20 times larger, so that there are outliers for a rotation to spread.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from torch import nn

_BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}

# What each family adds to the base, chosen to be awkward where the family allows it.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3_ROPE}),
    "mistral": ("Mistral", {"head_dim": 64, "sliding_window": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 64, "attention_bias": True}),
    "phi3": ("Phi3", {"rope_parameters": _PARTIAL_ROPE}),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True, "no_rope_layers": [1, 0]}),
    "granite": (
        "Granite",
        {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "gemma": ("Gemma", {"head_dim": 64, "tie_word_embeddings": True}),
}
MOE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 32, "num_experts": 4, "mlp_only_layers": [1], **_MOE}),
}


def build_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> nn.Module:
    """A tiny causal-LM model of ``family`` in eval mode; ``overrides`` go to its config."""
    stem, extra = (FAMILIES | MOE_FAMILIES)[family]
    config = getattr(transformers, f"{stem}Config")(**(_BASE | extra | overrides))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    shift = 1.0 if family == "gemma" else 0.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2).sub_(shift)
            elif name.endswith("bias"):
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        width = model.config.hidden_size
        model.get_input_embeddings().weight[:, [3 % width, 17 % width, 40 % width]] *= 20
    return model.to(dtype)


def _wide_forward(offset: float, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (offset + norm.weight)


def _wide_router(router: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = nn.functional.linear(x.reshape(-1, router.hidden_dim), router.weight)
    value, index = logits.softmax(-1).topk(router.top_k, dim=-1)
    if getattr(router, "norm_topk_prob", True):
        value = value / value.sum(-1, keepdim=True)
    return logits, value, index


def widen_norms(model: nn.Module) -> nn.Module:
    """Let transformers' RMSNorms and routers compute in the dtype of their input (they round to fp32), for float64."""
    model.config._experts_implementation = "eager"  # the default, grouped_mm, has no float64
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = MethodType(_wide_router, module)
        if type(module).__name__.endswith("RMSNorm"):
            offset = 1.0 if type(module).__name__.startswith("Gemma") else 0.0
            module.forward = MethodType(lambda norm, x, offset=offset: _wide_forward(offset, norm, x), module)
    return model


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each dense family in turn; a test that takes ``family`` runs on all of them."""
    return request.param


@pytest.fixture(params=MOE_FAMILIES)
def moe_family(request: pytest.FixtureRequest) -> str:
    """Each mixture-of-experts family in turn."""
    return request.param


@pytest.fixture
def tiny_model() -> Callable[..., nn.Module]:
    """``tiny_model(family, dtype=torch.float32, seed=0, **config)``: see :func:`build_model`."""
    return build_model


@pytest.fixture
def exact_logits() -> Callable[..., torch.Tensor]:
    """``exact_logits(model, ids)``: logits of a float64 model without transformers' roundings to fp32."""

    def run(model: nn.Module, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():
            return widen_norms(model)(ids, **kwargs).logits

    return run


@pytest.fixture
def share_apart() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """``share_apart(ours, theirs)``: of the sequences in logits [B, T, vocab], those that went another way.

    They have a token more than a thousandth away. For models with quantised activations that two sides compute in fp32:
    these round apart by 1e-7, which moves a few codes in 10^7 (16 times as many with 8 bits as with 4), and random
    layers of 4 bits amplify one such code until whatever follows it in its sequence is a tenth away. How far a few
    sequences are apart is therefore chance; how many of many short ones are is not: most meet no such code, and a fault
    leaves none as it was.
    """

    def share(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        apart = (ours - theirs).norm(dim=-1) > 1e-3 * theirs.norm(dim=-1)
        return apart.any(1).float().mean().item()

    return share


@pytest.fixture
def token_ids() -> torch.Tensor:
    """int64 [2, 17] random tokens of the tiny models."""
    return torch.randint(3, 128, (2, 17), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.manual_seed(0)


def pytest_configure() -> None:
    """Tensors here are tiny: threads only get in each other's way, more so under pytest-xdist."""
    torch.set_num_threads(1)
