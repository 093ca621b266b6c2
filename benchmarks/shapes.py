"""What a benchmark is asked for: models by name, and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quarot.bench.shapes import SHAPES, Shape

__all__ = ["DEFAULT_MODELS", "SHAPES", "Options", "Shape"]


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

    def cache_shapes(self) -> Iterator[Shape]:
        """Those of them whose caches differ: the first of every (kv heads, head_dim)."""
        found: dict[tuple[int, int], Shape] = {}
        for shape in self.shapes():
            found.setdefault((shape.kv_heads, shape.head_dim), shape)
        return iter(found.values())
