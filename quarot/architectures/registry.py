"""Which family a model belongs to (by class, never by model name), its sizes, and its linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from quarot.architectures.gemma import GEMMA
from quarot.architectures.granite import GRANITE
from quarot.architectures.llama import LLAMA
from quarot.architectures.mistral import MISTRAL
from quarot.architectures.mixtral import MIXTRAL
from quarot.architectures.phi3 import PHI3
from quarot.architectures.qwen2 import QWEN2
from quarot.architectures.qwen3 import QWEN3
from quarot.architectures.qwen3_moe import QWEN3_MOE
from quarot.architectures.record import Architecture, Projection
from quarot.architectures.smollm3 import SMOLLM3
from quarot.architectures.unsupported import REASONS
from quarot.nn.expert_list import ExpertList

ARCHITECTURES: dict[str, Architecture] = {
    record.model_class: record
    for record in (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, SMOLLM3, GRANITE, GEMMA, MIXTRAL, QWEN3_MOE)
}


class Geometry(NamedTuple):
    """Sizes of a model: residual width, query heads, key-value heads, width of a head, MLP width, decoder layers."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    num_layers: int

    def rows(self, part: str) -> int:
        """Output rows of one part of a projection."""
        return {
            "q": self.heads * self.head_dim,
            "k": self.kv_heads * self.head_dim,
            "v": self.kv_heads * self.head_dim,
            "o": self.hidden,
            "gate": self.intermediate,
            "up": self.intermediate,
            "down": self.hidden,
        }[part]

    def row_slice(self, projection: Projection, part: str) -> slice:
        """Which output rows of a projection hold ``part``."""
        before = sum(self.rows(p) for p in projection.parts[: projection.parts.index(part)])
        return slice(before, before + self.rows(part))


def architecture_of(model: nn.Module) -> Architecture:
    """The record of the model's family, found by its class or a base class of it.

    Raises:
        NotImplementedError: naming the family, why it is not supported, and which are.
        TypeError: not a model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a loaded transformers model is wanted, not {model!r}: AutoModelForCausalLM.from_pretrained")
    names = [cls.__name__ for cls in type(model).__mro__]
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    reason = next((REASONS[name] for name in names if name in REASONS), None)
    if reason is None:
        reason = _wrapping(names[0]) or "quarot has no record of this class"
        if any(isinstance(module, nn.LayerNorm) for module in model.modules()):
            reason += ", and it uses LayerNorm, which does not commute with a rotation"
    supported = ", ".join(ARCHITECTURES)
    raise NotImplementedError(f"{names[0]} is not supported: {reason}. Supported: {supported}")


def _wrapping(name: str) -> str | None:
    """What is wrong with a supported model in a wrong guise, and the way out; None for other classes."""
    if name == "OptimizedModule":
        return "it is compiled; rotate and quantise first, then torch.compile"
    if name.startswith(("Peft", "Lora")):
        return "it carries adapters; merge_and_unload() them first"
    if name in ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"):
        return "it is wrapped for training; pass its .module"
    stems = (supported.removesuffix("ForCausalLM") for supported in ARCHITECTURES)
    if any(name.startswith((f"{stem}Model", f"{stem}For")) for stem in stems):
        return "only models with a language-modelling head are; load it with AutoModelForCausalLM"
    return None


def geometry(model: Any) -> Geometry:
    """Sizes of a model (or of its config), with transformers' own fallbacks for what the config leaves out."""
    config = getattr(model, "config", model)
    heads = config.num_attention_heads
    return Geometry(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=config.intermediate_size,
        num_layers=config.num_hidden_layers,
    )


def expert_intermediate(model: Any) -> int | None:
    """MLP width of one expert of a mixture-of-experts model, None for a dense one."""
    if architecture_of(model).experts is None:
        return None
    return getattr(model.config, "moe_intermediate_size", None) or model.config.intermediate_size


def decoder_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Name and module of every decoder layer, in order."""
    path = architecture_of(model).layers
    for index, layer in enumerate(model.get_submodule(path).children()):
        yield f"{path}.{index}", layer


def decoder(model: nn.Module) -> nn.Module:
    """Embedding, decoder layers and final norm: the model without its head."""
    return model.get_submodule(architecture_of(model).layers.rpartition(".")[0])


def logits_scaling(model: Any) -> float:
    """What the output of the head is divided by; 1 but for Granite."""
    return float(getattr(model.config, "logits_scaling", None) or 1.0)


def has_submodule(module: nn.Module, path: str) -> bool:
    """Whether a dotted path leads to a module."""
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def linear_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """``(name, module, role)`` of every linear layer: those of the decoder layers in order, then ``lm_head``.

    The modules may be ``nn.Linear`` or what took its place. Roles are those of :class:`Projection`, and ``lm_head``.
    Experts appear, as ``expert_gate_up`` and ``expert_down``, once they are an
    :class:`~quarot.nn.expert_list.ExpertList`; in 3-D parameters they are not linear layers.
    """
    record = architecture_of(model)
    for name, layer in decoder_layers(model):
        for projection in record.projections:
            if has_submodule(layer, projection.path):
                yield f"{name}.{projection.path}", layer.get_submodule(projection.path), projection.role
        path = record.experts.module if record.experts is not None else ""
        if path and has_submodule(layer, path) and isinstance(experts := layer.get_submodule(path), ExpertList):
            for inner, module, role in experts.linears():
                yield f"{name}.{path}.{inner}", module, role
    yield record.lm_head, model.get_submodule(record.lm_head), "lm_head"
