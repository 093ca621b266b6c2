"""Model families as data: one record a file, and the registry that finds the record of a model.

To add a family: a file with its record (state how it differs from Llama), one entry in ``registry.ARCHITECTURES``,
and one in ``FAMILIES`` of ``tests/conftest.py``, which then runs it through every test of rotation and saving.
"""

from quarot.architectures.record import Architecture, Experts, Projection
from quarot.architectures.registry import (
    ARCHITECTURES,
    Geometry,
    architecture_of,
    decoder,
    decoder_layers,
    expert_intermediate,
    geometry,
    has_submodule,
    linear_modules,
    logits_scaling,
)

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Experts",
    "Geometry",
    "Projection",
    "architecture_of",
    "decoder",
    "decoder_layers",
    "expert_intermediate",
    "geometry",
    "has_submodule",
    "linear_modules",
    "logits_scaling",
]
