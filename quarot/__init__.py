"""quarot: a Hugging Face LLM end to end in 4 bits: weights, activations and KV cache, after QuaRot (arXiv 2404.00456).

Public names load on first use (PEP 562). Importing quarot makes transformers load and run quarot checkpoints.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from quarot.integrations import register as _register

if TYPE_CHECKING:
    from quarot.calibration.seed_search import search_seed
    from quarot.config import QuarotConfig
    from quarot.evaluation.perplexity import perplexity
    from quarot.integrations.transformers.loading import load
    from quarot.nn.quant_kv_cache import QuantKVCache
    from quarot.nn.quant_linear import QuantLinear
    from quarot.ops.hadamard import hadamard_transform
    from quarot.quantization.quantize_model import quantize_model
    from quarot.rotation.plan import RotationPlan
    from quarot.rotation.rotate import rotate_model
    from quarot.rotation.spec import HadamardSpec
    from quarot.runtime.generate import generate
    from quarot.streaming.quantize_checkpoint import quantize_checkpoint

__version__ = "0.1.0"

_PLACES = {
    "HadamardSpec": "quarot.rotation.spec",
    "QuantKVCache": "quarot.nn.quant_kv_cache",
    "QuantLinear": "quarot.nn.quant_linear",
    "QuarotConfig": "quarot.config",
    "RotationPlan": "quarot.rotation.plan",
    "generate": "quarot.runtime.generate",
    "hadamard_transform": "quarot.ops.hadamard",
    "load": "quarot.integrations.transformers.loading",
    "perplexity": "quarot.evaluation",
    "quantize_checkpoint": "quarot.streaming.quantize_checkpoint",
    "quantize_model": "quarot.quantization.quantize_model",
    "rotate_model": "quarot.rotation.rotate",
    "search_seed": "quarot.calibration.seed_search",
}

__all__ = [
    "HadamardSpec",
    "QuantKVCache",
    "QuantLinear",
    "QuarotConfig",
    "RotationPlan",
    "__version__",
    "generate",
    "hadamard_transform",
    "load",
    "perplexity",
    "quantize_checkpoint",
    "quantize_model",
    "rotate_model",
    "search_seed",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'quarot' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PLACES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


_register()
