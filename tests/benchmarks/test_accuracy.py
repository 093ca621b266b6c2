"""The accuracy script: which runs share their quantised weights."""

import argparse
import sys
from pathlib import Path

import pytest


@pytest.fixture
def accuracy(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")  # it runs as a script there
    import accuracy

    yield accuracy
    for name in ("accuracy", "accuracy_settings"):
        sys.modules.pop(name, None)


def options(*overrides: str) -> argparse.Namespace:
    return argparse.Namespace(samples=8, set=list(overrides), settings="w4a4kv4-gptq,kv4,w4a8kv4-gptq,kv8", seeds=1)


def test_runs_that_share_weights_follow_each_other(accuracy):
    names = [name for name, _ in accuracy.runs(options())]
    assert names == ["w4a4kv4-gptq", "w4a8kv4-gptq", "kv4", "kv8"]
    assert accuracy.key_of("w4a4kv4-gptq", 0, options()) != accuracy.key_of("w4a4kv4-gptq", 1, options())
    assert accuracy.key_of("best", 0, options()) != accuracy.key_of("best-w4a8kv4", 0, options())


def test_a_calibration_that_sees_activations_shares_with_no_other_bits(accuracy):
    """Also where ``--set`` asked for it."""
    seeing = options("gptq_quantized_inputs=true")
    assert accuracy.key_of("w4a4kv4-gptq", 0, seeing) != accuracy.key_of("w4a8kv4-gptq", 0, seeing)
