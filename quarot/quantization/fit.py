"""Which widths and groups fit which layer, checked before anything is touched."""

from __future__ import annotations

from quarot.config import QuarotConfig
from quarot.quantization.packing import K_ALIGNMENT


def check_fits(name: str, in_features: int, config: QuarotConfig) -> None:
    """Raise a ValueError that names the layer and the way out when ``config`` does not fit ``in_features`` inputs."""
    w_group = None if config.w_bits == 16 else config.w_group_size
    a_group = None if config.a_bits == 16 else config.a_group_size
    for kind, size in (("weight", w_group), ("activation", a_group)):
        if size is None:
            continue
        if in_features % size:
            raise ValueError(
                f"{name}: {kind} groups of {size} do not divide its {in_features} inputs;"
                f" choose a divisor, None (no groups), or override this layer"
            )
        if config.a_bits < 16 and size % K_ALIGNMENT:
            raise ValueError(
                f"{name}: {kind} groups of {size} do not fit integer GEMMs, which take multiples of {K_ALIGNMENT};"
                f" choose such a group, or a_bits=16"
            )
    if w_group is not None and a_group is not None and a_group % w_group:
        raise ValueError(f"{name}: activation groups of {a_group} must be a multiple of the weight groups of {w_group}")
