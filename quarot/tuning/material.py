"""What a distillation is trained on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Material(NamedTuple):
    """Token windows and what the full-precision model says to them.

    Attributes:
        windows: int64 [W, T].
        targets: [W, T, hidden], outputs of the model's final norm (:func:`quarot.tuning.tune.final_states`).
        held: how many of them, the last ones, are not trained on but tell when training did best.
    """

    windows: Tensor
    targets: Tensor
    held: int = 0
