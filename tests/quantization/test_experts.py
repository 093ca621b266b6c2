"""Mixtures of experts: each expert's projections are quantised, packed, saved, loaded and run as linear layers are."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from quarot.architectures import linear_modules
from quarot.nn.quant_linear import QuantLinear, linear_weight
from quarot.ops.hadamard import hadamard
from quarot.quantization import expert_moments
from quarot.quantization.quantize_model import quantize_model
from quarot.rotation.rotate import rotate_model

GPTQ = {"calibration_samples": 2, "calibration_length": 16}


def _error(model: Any, before: torch.Tensor, ids: torch.Tensor) -> float:
    """Of the median token: a router of random weights sends some tokens elsewhere at the slightest change."""
    with torch.no_grad():
        return ((model(ids).logits - before).norm(dim=-1) / before.norm(dim=-1)).median().item()


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_experts_are_packed_saved_and_loaded(
    moe_family: str, method: str, rotate: bool, tiny_model: Callable[..., Any], token_ids: torch.Tensor, tmp_path: Any
) -> None:
    model = tiny_model(moe_family)
    with torch.no_grad():
        before = model(token_ids).logits
    if rotate:
        rotate_model(model, progress=False)
    calibration = torch.randint(3, 128, (1, 400)) if method == "gptq" else None
    bits = {"w_bits": 8, "a_bits": 16, "k_bits": 16, "v_bits": 16}
    quantize_model(model, calibration=calibration, w_method=method, progress=False, **bits, **GPTQ)
    kinds = {role: type(module) for _, module, role in linear_modules(model) if role != "lm_head"}
    assert set(kinds.values()) == {QuantLinear}
    assert {"expert_gate_up", "expert_down"} <= set(kinds)
    assert _error(model, before, token_ids) < 0.1
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(token_ids).logits, model(token_ids).logits)


def test_a_checkpoint_that_lacks_an_expert_is_refused(tiny_model: Callable[..., Any], tmp_path: Any) -> None:
    from safetensors.torch import save_file

    model = tiny_model("mixtral")
    rotate_model(model, progress=False)
    quantize_model(model, w_method="rtn", progress=False)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = next(name for name in tensors if name.endswith("experts.down.2.qweight"))
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"experts.down.2.qweight"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_four_bit_experts_generate(moe_family: str, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(moe_family)
    rotate_model(model, progress=False)
    quantize_model(model, w_method="rtn", progress=False)
    tokens = model.generate(torch.tensor([[5, 9, 11]]), max_new_tokens=5, do_sample=False, eos_token_id=None)
    assert tokens.shape == (1, 8)


def _experts(model: Any) -> dict[str, torch.Tensor]:
    return {n: m.dequantize() for n, m, role in linear_modules(model) if role.startswith("expert")}


def _routed_moments(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean of x x^T over the tokens that reach each expert projection of a rotated model, after its online rotation."""
    seen: dict[str, list[torch.Tensor]] = {}

    def watch(name: str, spec: Any) -> Callable[..., None]:
        def hook(_: Any, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0] if spec is None else hadamard(args[0], spec.order, spec.pow2, spec.inner)
            seen.setdefault(name, []).append(x)

        return hook

    linears = [(n, m) for n, m, role in linear_modules(model) if role.startswith("expert")]
    handles = [m.register_forward_pre_hook(watch(n, getattr(m, "input_rotation", None))) for n, m in linears]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(x).T @ torch.cat(x) / len(torch.cat(x)) for name, x in seen.items()}


def _loss(weights: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], moments: dict[str, torch.Tensor]) -> float:
    """Mean relative output error of the projections in ``moments``."""
    errors = [(weights[n] - exact[n], exact[n], h) for n, h in moments.items()]
    return sum((((e @ h) * e).sum() / ((w @ h) * w).sum()).item() for e, w, h in errors) / len(errors)


SKEWED = torch.randint(3, 24, (40, 64), generator=torch.Generator().manual_seed(7))
"""Windows of a few different tokens, so that inputs have directions that matter more than others."""
WEIGHTS_ONLY = {"w_bits": 3, "a_bits": 16, "k_bits": 16, "v_bits": 16, "progress": False}


def test_gptq_of_experts_beats_rounding(moe_family: str, tiny_model: Callable[..., Any]) -> None:
    """On the tokens that each expert sees; quantising layers in front of it changes those little enough."""
    model = tiny_model(moe_family)
    rotate_model(model, progress=False)
    exact = {n: linear_weight(m).detach() for n, m, role in linear_modules(model) if role.startswith("expert")}
    moments = _routed_moments(model, SKEWED)
    rtn = quantize_model(copy.deepcopy(model), w_method="rtn", **WEIGHTS_ONLY)
    gptq = quantize_model(copy.deepcopy(model), calibration=SKEWED, **WEIGHTS_ONLY)
    assert not (set(gptq.config.quantization_config.starved_experts) and moe_family == "mixtral")
    assert _loss(_experts(gptq), exact, moments) < 0.75 * _loss(_experts(rtn), exact, moments)


STARVED = {"num_local_experts": 8, "num_experts_per_tok": 1}


def test_experts_without_tokens_borrow_some(
    tiny_model: Callable[..., Any], token_ids: torch.Tensor, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    """The router of layer 0 is made to ignore three experts: they are named, and still better than rounded."""
    model = tiny_model("mixtral", **STARVED)
    rotate_model(model, progress=False)
    with torch.no_grad():
        layer = model.model.layers[0].mlp
        # Means of other experts' rows never win.
        layer.gate.weight[5:] = torch.stack([layer.gate.weight[i : i + 3].mean(0) for i in range(3)])
    exact = {n: linear_weight(m).detach() for n, m, role in linear_modules(model) if role.startswith("expert")}
    rtn = quantize_model(copy.deepcopy(model), w_method="rtn", **WEIGHTS_ONLY)
    gptq = quantize_model(copy.deepcopy(model), calibration=SKEWED, **WEIGHTS_ONLY)
    starved = gptq.config.quantization_config.starved_experts
    idle = [f"model.layers.0.mlp.experts.{kind}.{i}" for kind in ("gate_up", "down") for i in (5, 6, 7)]
    unreached = sorted(name for name, tokens in starved.items() if tokens == 0)
    assert set(idle) <= set(unreached)
    warnings = [r for r in caplog.records if "topped up with other tokens" in r.getMessage()]
    assert len(warnings) == 1
    assert f"{len(starved)} expert projections" in warnings[0].getMessage()

    # What the idle experts would see if the layer's tokens came to them.
    layer.gate.register_forward_hook(lambda _, __, out: (*out[:2], 5 + torch.arange(len(out[2]))[:, None] % 3))
    would_see = {n: h for n, h in _routed_moments(model, SKEWED).items() if n in idle}
    assert len(would_see) == len(idle)
    assert _loss(_experts(gptq), exact, would_see) < 0.8 * _loss(_experts(rtn), exact, would_see)

    gptq.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.quantization_config.starved_experts == starved
    with torch.no_grad():
        assert torch.equal(again(token_ids).logits, gptq(token_ids).logits)


def test_without_borrowing_only_experts_without_a_token_are_rounded(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("mixtral", **STARVED)
    rotate_model(model, progress=False)
    few = torch.randint(3, 128, (1, 4), generator=torch.Generator().manual_seed(3))
    rtn = quantize_model(copy.deepcopy(model), w_method="rtn", **WEIGHTS_ONLY)
    gptq = quantize_model(model, calibration=few, gptq_expert_tokens=0, **WEIGHTS_ONLY)
    starved = gptq.config.quantization_config.starved_experts
    assert starved and set(starved.values()) == {0}
    rounded, calibrated = _experts(rtn), _experts(gptq)
    assert {name for name in rounded if torch.equal(rounded[name], calibrated[name])} == set(starved)


def test_many_experts_in_several_passes_and_resumed(
    tiny_model: Callable[..., Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the memory bound nor a run that stopped after its first layer changes a code or the report."""
    model = tiny_model("mixtral", **STARVED)
    rotate_model(model, progress=False)
    whole = quantize_model(copy.deepcopy(model), calibration=SKEWED[:3], **WEIGHTS_ONLY)
    monkeypatch.setattr(expert_moments, "BYTES_AT_ONCE", 3 * 4 * 128**2)
    quantize_model(copy.deepcopy(model), calibration=SKEWED[:3], resume_dir=tmp_path, **WEIGHTS_ONLY)
    (tmp_path / "model.layers.1.safetensors").unlink()
    resumed = quantize_model(model, calibration=SKEWED[:3], resume_dir=tmp_path, **WEIGHTS_ONLY)
    assert resumed.config.quantization_config == whole.config.quantization_config
    assert whole.config.quantization_config.starved_experts
    for (name, a), (_, b) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert torch.equal(a, b), name


_RELOAD = """
import sys, torch, quarot
model = quarot.load(sys.argv[1])
torch.save(model(torch.load(sys.argv[2])).logits, sys.argv[3])
"""


def test_a_new_process_computes_the_same(
    moe_family: str, tiny_model: Callable[..., Any], token_ids: torch.Tensor, tmp_path: Any
) -> None:
    model = tiny_model(moe_family)
    rotate_model(model, progress=False)
    quantize_model(model, calibration=SKEWED, progress=False)
    model.save_pretrained(tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    packed = {n: t for n, t in stored.items() if ".experts." in n and n.endswith("qweight")}
    assert len(packed) == (16 if moe_family == "mixtral" else 8)
    assert {t.dtype for t in packed.values()} == {torch.uint8}
    torch.save(token_ids, tmp_path / "ids.pt")
    files = [str(tmp_path / name) for name in ("model", "ids.pt", "logits.pt")]
    subprocess.run([sys.executable, "-c", _RELOAD, *files], check=True)
    with torch.no_grad():
        assert torch.equal(torch.load(tmp_path / "logits.pt"), model(token_ids).logits)


def test_options_beyond_the_paper_leave_experts_to_plain_gptq(tiny_model: Callable[..., Any]) -> None:
    """No teacher and no bias: asymmetric targets and bias correction are for the dense layers."""
    model = tiny_model("mixtral")
    rotate_model(model, progress=False)
    options = dict.fromkeys(("gptq_asymmetric", "gptq_bias_correction", "gptq_relative_error", "a_clip_search"), True)
    quantize_model(model, calibration=SKEWED[:4], **options, progress=False)
    with torch.no_grad():
        assert model(SKEWED[:1]).logits.isfinite().all()


def test_tuning_is_refused(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("mixtral")
    with pytest.raises(NotImplementedError, match="a mixture of experts cannot be tuned; set tune_steps=0"):
        quantize_model(model, calibration=torch.randint(3, 128, (1, 400)), tune_steps=3, progress=False, **GPTQ)
