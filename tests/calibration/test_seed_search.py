"""The seed of a rotation, chosen by calibration perplexity."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from quarot import QuarotConfig, search_seed


def test_the_best_of_some_seeds(tiny_model: Callable[..., nn.Module]) -> None:
    ids = torch.randint(3, 128, (2000,))
    arguments = {"calibration": ids, "windows": 3, "length": 32, "progress": False}
    seed, found = search_seed(lambda: tiny_model("llama"), [3, 1, 4], QuarotConfig(w_bits=3), **arguments)
    assert set(found) == {3, 1, 4}
    assert found[seed] == min(found.values())
    assert len(set(found.values())) == 3
    again = search_seed(lambda: tiny_model("llama"), [seed], QuarotConfig(w_bits=3), **arguments)
    assert again == (seed, {seed: found[seed]})


def test_no_seeds(tiny_model: Callable[..., nn.Module]) -> None:
    with pytest.raises(ValueError, match="no seeds"):
        search_seed(lambda: tiny_model("llama"), [], calibration=torch.arange(3, 100), windows=1, length=16)
