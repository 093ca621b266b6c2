"""Everything that can be wrong with a model, found before any of it is touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from quarot.architectures import Architecture, Geometry, decoder_layers, has_submodule
from quarot.config import QuarotConfig


def check_structure(model: nn.Module, record: Architecture, sizes: Geometry) -> None:
    """Check all but the values: whether a model of this structure, in memory or not, can be rotated.

    Raises:
        ValueError: already rotated or quantised.
        NotImplementedError: its structure is not what the record of its family says, or weights are shared.
    """
    check_unquantized(model)
    _check_linears(model, record, sizes)
    _check_all_claimed(model, record)
    _check_sharing(model, record)


def check_device(device: torch.device | str | None) -> None:
    """Raise ValueError for a device that does not exist here; None is always right."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device={device!r} cannot be used here: {str(error).splitlines()[0]}") from None


def check_finished(model: nn.Module) -> None:
    """Raise ValueError for a model whose rotation was interrupted: it computes nothing sensible."""
    if getattr(model, "quarot_unfinished", False):
        raise ValueError(
            "a rotation of this model was interrupted, so that only some of its weights are rotated; load the original "
            "model and start from there"
        )


def check_unquantized(model: nn.Module) -> None:
    """Refuse a model that quarot has rotated or quantised, or that another method has quantised (GGUF loads dense)."""
    check_finished(model)
    config: Any = getattr(model.config, "quantization_config", None)
    get = config.get if isinstance(config, dict) else lambda key: getattr(config, key, None)
    method = str(getattr(get("quant_method"), "value", get("quant_method"))) if config is not None else None
    if method == "quarot":
        recorded = QuarotConfig.from_dict(config) if isinstance(config, dict) else config
        state = "quantised" if recorded.rounds_linears or recorded.rounds_cache else "rotated"
        raise ValueError(f"this model is already {state} by quarot; load the original model and start from there")
    if getattr(model, "quarot_rotation", None) is not None:
        raise ValueError("this model is already rotated by quarot; load the original model and start from there")
    if method is not None and method != "gguf":
        raise ValueError(
            f"this model is quantised by {method!r}; rotation needs the original weights: load the unquantised model"
        )


def _check_linears(model: nn.Module, record: Architecture, sizes: Geometry) -> None:
    def check(name: str, module: nn.Module, shape: tuple[int, int]) -> None:
        if type(module) is not nn.Linear or not module.weight.is_floating_point():
            hint = "; pass GgufConfig(dequantize=True) to from_pretrained" if "Gguf" in type(module).__name__ else ""
            raise ValueError(f"{name} is a {type(module).__name__}, not a plain floating-point nn.Linear{hint}")
        if tuple(module.weight.shape) != shape:
            raise NotImplementedError(
                f"{name}: weight {tuple(module.weight.shape)}, but the config of this {record.family} says {shape}"
            )

    columns = {"attn_out": sizes.heads * sizes.head_dim, "mlp_out": sizes.intermediate}
    for name, layer in decoder_layers(model):
        for slot, projections in record.slots.items():
            for projection in projections:
                if has_submodule(layer, projection.path):
                    rows = sum(sizes.rows(part) for part in projection.parts)
                    shape = (rows, columns.get(slot, sizes.hidden))
                    check(f"{name}.{projection.path}", layer.get_submodule(projection.path), shape)
                elif not (record.experts and slot.startswith("mlp") and has_submodule(layer, record.experts.module)):
                    raise NotImplementedError(f"{name} has no {projection.path}, which a {record.family} model has")
        if record.experts is not None and has_submodule(layer, record.experts.module):
            _check_experts(f"{name}.{record.experts.module}", layer.get_submodule(record.experts.module), record, sizes)
    embed, head = model.get_submodule(record.embed), model.get_submodule(record.lm_head)
    check(record.lm_head, head, (head.weight.shape[0], sizes.hidden))
    if not isinstance(embed, nn.Embedding) or embed.weight.shape[1] != sizes.hidden:
        raise NotImplementedError(f"{record.embed} is not an embedding of width {sizes.hidden}: {embed}")


def _check_experts(name: str, experts: nn.Module, record: Architecture, sizes: Geometry) -> None:
    assert record.experts is not None
    for path, hidden_dim in ((record.experts.gate_up, -1), (record.experts.down, -2)):
        weight = getattr(experts, path, None)
        if not isinstance(weight, nn.Parameter) or weight.dim() != 3 or weight.shape[hidden_dim] != sizes.hidden:
            raise NotImplementedError(f"{name}.{path} is not the 3-D parameter that a {record.family} model has")


def _claimed(model: nn.Module, record: Architecture) -> Iterator[str]:
    yield from (f"{path}.weight" for path in (record.embed, record.final_norm, record.lm_head))
    yield f"{record.lm_head}.bias"
    for name, _ in decoder_layers(model):
        for norm in (record.attn_norm, record.mlp_norm, *record.head_norms):
            yield f"{name}.{norm}.weight"
        for projection in record.projections:
            yield from (f"{name}.{projection.path}.{kind}" for kind in ("weight", "bias"))
        if record.experts is not None:
            yield f"{name}.{record.experts.router}.weight"
            yield from (f"{name}.{record.experts.module}.{p}" for p in (record.experts.gate_up, record.experts.down))


def _check_all_claimed(model: nn.Module, record: Architecture) -> None:
    """Every parameter has a known role; one that has none may not commute with the rotation (adapters, extra norms)."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    unknown = sorted(names - set(_claimed(model, record)))
    if unknown:
        raise NotImplementedError(
            f"{type(model).__name__} has weights that a {record.family} model does not have: {', '.join(unknown[:4])}"
            f"{' ...' if len(unknown) > 4 else ''}; merge adapters first"
        )


def _check_sharing(model: nn.Module, record: Architecture) -> None:
    tied = {f"{record.embed}.weight", f"{record.lm_head}.weight"}
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = seen.setdefault(id(parameter), name)
        if other != name and {name, other} != tied:
            raise NotImplementedError(f"{name} and {other} share one weight, which cannot be rotated for both")


WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes whose values are the weights themselves."""


def check_values(module: nn.Module, prefix: str = "", offloaded: bool = False) -> None:
    """Check the weights of a model, or of a part of it whose names begin with ``prefix``.

    Args:
        offloaded: weights on the meta device are passed over, not refused.

    Raises:
        ValueError: a weight is on the meta device or offloaded, holds NaN or infinity, or is of 8 bits or fewer.
    """
    for name, parameter in module.named_parameters(prefix):
        if parameter.dtype not in WIDE:
            raise ValueError(
                f"{name} is {parameter.dtype}, codes that mean nothing without their scales; load or save the model in "
                "bfloat16 first"
            )
        if not offloaded and parameter.device.type == "meta":
            raise ValueError(
                f"{name} is on the meta device (not loaded, or offloaded by accelerate); load the model into memory "
                f"(device_map='cpu') and pass device='cuda' to rotate on the GPU"
            )
    for name, parameter in module.named_parameters(prefix):
        if parameter.numel() == 0 or parameter.is_meta:
            continue
        low, high = parameter.detach().aminmax()
        if not torch.isfinite(torch.stack((low, high)).float()).all():
            raise ValueError(f"{name} holds NaN or infinity: the checkpoint is damaged, or overflows {parameter.dtype}")
