"""What a distillation is trained on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Material(NamedTuple):
    """Windows of text and what the full-precision model makes of them.

    Attributes:
        windows: what the student is given: token ids int64 [W, T], or hidden states in front of a layer [W, T, hidden].
        targets: [W, T, hidden], outputs of the model's final norm (:func:`quarot.tuning.tune.final_states`), or hidden
            states behind that layer.
        held: how many of them, the last ones, are not trained on but tell when training did best.
    """

    windows: Tensor
    targets: Tensor
    held: int = 0
