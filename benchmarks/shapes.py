"""Widths of real models, so that every benchmark speaks of the same layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One model's decoder layer.

    Attributes:
        model: the name that benchmark rows carry.
        hidden, intermediate: widths of the residual stream and of the MLP.
        heads, kv_heads, head_dim: attention geometry.
        layers: decoder layers.
        vocab: rows of the embedding.
    """

    model: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int

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
        Shape("mistral-7b", 4096, 14336, 32, 8, 128, 32, 32000),
        Shape("qwen2.5-7b", 3584, 18944, 28, 4, 128, 28, 152064),
        Shape("qwen3-8b", 4096, 12288, 32, 8, 128, 36, 151936),
        Shape("qwen3-32b", 5120, 25600, 64, 8, 128, 64, 151936),
    )
}

DEFAULT_MODELS = ("llama-2-7b", "llama-2-70b", "llama-3-8b")


@dataclass(frozen=True)
class Options:
    """What a benchmark is asked for.

    Attributes:
        models: names in :data:`SHAPES`.
        tokens: values of M for GEMMs and row-wise kernels.
        batches, contexts: batch sizes and cached tokens for attention.
        quick: the smallest run that still says something.
    """

    models: tuple[str, ...] = DEFAULT_MODELS
    tokens: tuple[int, ...] = (1, 16, 64, 256, 2048, 8192)
    batches: tuple[int, ...] = (1, 16, 64)
    contexts: tuple[int, ...] = (2048, 8192, 32768)
    quick: bool = False

    def __post_init__(self) -> None:
        for name in self.models:
            if name not in SHAPES:
                raise ValueError(f"no shapes for model {name!r}; known are {', '.join(SHAPES)}")

    @classmethod
    def quickest(cls) -> Options:
        return cls(("llama-2-7b",), (1, 16, 2048), (1, 16), (2048, 8192), quick=True)

    def shapes(self) -> Iterator[Shape]:
        """The shapes of the chosen models."""
        return (SHAPES[name] for name in self.models)
