"""Sizes of real models, so that every measurement speaks of the same layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """One model's decoder layer.

    Attributes:
        model: the name that benchmark rows carry.
        hidden, intermediate: widths of the residual stream and of the MLP.
        heads, kv_heads, head_dim: attention geometry.
        layers: decoder layers.
        vocab: rows of the embedding.
        family: prefix of its classes in transformers, which know about biases and head norms.
        experts: of a mixture: how many, and how many a token; ``intermediate`` is that of one expert then.
    """

    model: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    family: str = "Llama"
    experts: tuple[int, int] | None = None

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """``{layer: (n outputs, k inputs)}`` of the decoder's GEMMs, siblings fused as at run time."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (queries + 2 * keys, self.hidden),
            "o_proj": (self.hidden, queries),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }


SHAPES = {
    shape.model: shape
    for shape in (
        Shape("smollm2-135m", 576, 1536, 9, 3, 64, 30, 49152),
        Shape("llama-3.2-1b", 2048, 8192, 32, 8, 64, 16, 128256),
        Shape("llama-3.2-3b", 3072, 8192, 24, 8, 128, 28, 128256),
        Shape("llama-2-7b", 4096, 11008, 32, 32, 128, 32, 32000),
        Shape("llama-2-13b", 5120, 13824, 40, 40, 128, 40, 32000),
        Shape("llama-2-70b", 8192, 28672, 64, 8, 128, 80, 32000),
        Shape("llama-3-8b", 4096, 14336, 32, 8, 128, 32, 128256),
        Shape("llama-3-70b", 8192, 28672, 64, 8, 128, 80, 128256),
        Shape("mistral-7b", 4096, 14336, 32, 8, 128, 32, 32000, "Mistral"),
        Shape("qwen2.5-7b", 3584, 18944, 28, 4, 128, 28, 152064, "Qwen2"),
        Shape("qwen3-8b", 4096, 12288, 32, 8, 128, 36, 151936, "Qwen3"),
        Shape("qwen3-32b", 5120, 25600, 64, 8, 128, 64, 151936, "Qwen3"),
        Shape("qwen3-30b-a3b", 2048, 768, 32, 4, 128, 48, 151936, "Qwen3Moe", (128, 8)),
        Shape("mixtral-8x7b", 4096, 14336, 32, 8, 128, 32, 32000, "Mixtral", (8, 2)),
    )
}


def config_of(shape: Shape, layers: int | None = None, vocab: int | None = None) -> Any:
    """A transformers configuration of these sizes, perhaps with fewer layers or rows of the embedding."""
    import transformers

    return getattr(transformers, f"{shape.family}Config")(
        vocab_size=vocab or shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=layers or shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=1 << 17,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        sliding_window=None,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        **_experts(shape),
    )


def _experts(shape: Shape) -> dict[str, Any]:
    """What configurations say of a mixture of experts; each family reads its own names."""
    if shape.experts is None:
        return {}
    count, top_k = shape.experts
    own = {"num_local_experts": count} if shape.family == "Mixtral" else {"num_experts": count, "norm_topk_prob": True}
    return {"num_experts_per_tok": top_k, "moe_intermediate_size": shape.intermediate, **own}
