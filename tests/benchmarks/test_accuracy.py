"""The accuracy script: which runs share their quantised weights, and which rows are measured already."""

import argparse
import sys
from pathlib import Path

import pytest

from quarot.config import QuarotConfig


@pytest.fixture
def accuracy(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")  # it runs as a script there
    import accuracy

    yield accuracy
    for name in ("accuracy", "accuracy_settings"):
        sys.modules.pop(name, None)


def options(*overrides: str) -> argparse.Namespace:
    settings = "w4a4kv4-gptq,kv4,w4a8kv4-gptq,kv8"
    return argparse.Namespace(samples=8, set=list(overrides), settings=settings, seeds=1, first_seed=0)


def test_runs_that_share_weights_follow_each_other(accuracy):
    names = [name for name, _ in accuracy.runs(options())]
    assert names == ["w4a4kv4-gptq", "w4a8kv4-gptq", "kv4", "kv8"]
    assert accuracy.key_of("w4a4kv4-gptq", 0, options()) != accuracy.key_of("w4a4kv4-gptq", 1, options())
    assert accuracy.key_of("best", 0, options()) != accuracy.key_of("best-w4a8kv4", 0, options())


def test_a_calibration_that_sees_activations_shares_with_no_other_bits(accuracy):
    """Also where ``--set`` asked for it."""
    seeing = options("gptq_quantized_inputs=true")
    assert accuracy.key_of("w4a4kv4-gptq", 0, seeing) != accuracy.key_of("w4a8kv4-gptq", 0, seeing)


def test_a_table_stands_for_its_settings_and_seeds_start_anywhere(accuracy):
    asked = options()
    asked.settings, asked.first_seed, asked.seeds = "w4a16+act_order,options", 2, 2
    found = accuracy.runs(asked)
    assert len(found) == len(set(found)) == 2 * len(accuracy._of_table("options"))
    assert found[0] == ("w4a16+act_order", 2)
    assert {seed for _, seed in found} == {2, 3}


def test_options_that_only_see_weights_are_quantised_once_for_all_activations(accuracy):
    def keys(option):
        return {accuracy.key_of(f"{base}+{option}", 0, options()) for base in ("w4a4kv4", "w4a8kv4", "w4a16")}

    assert len(keys("act_order")) == 1
    assert len(keys("quantized_inputs")) == len(keys("search_seed")) == 3


def test_a_search_rotates_with_the_seed_it_chose(accuracy, monkeypatch):
    """The candidates of different seeds are different, and the calibration windows stay those of the run."""
    seen = {}

    def search_seed(load, seeds, config, **rest):
        seen.update(seeds=list(seeds), bits=(config.w_bits, config.a_bits, config.k_bits))
        return 9, {9: 1.0}

    asked = options()
    asked.model, asked.dtype, asked.device, asked.calibration = "any", "float32", "cpu", "text"
    loader = argparse.Namespace(from_pretrained=lambda *_, **__: argparse.Namespace(to=lambda device: "model"))
    monkeypatch.setattr(accuracy, "AutoModelForCausalLM", loader)
    monkeypatch.setattr(accuracy.quarot, "search_seed", search_seed)
    monkeypatch.setattr(accuracy.quarot, "rotate_model", lambda model, seed, **_: seen.update(rotation=seed))
    monkeypatch.setattr(accuracy.quarot, "quantize_model", lambda model, seed, **_: seen.update(calibration=seed))
    accuracy.quantized("w4a8kv4+search_seed", 1, asked, None)
    assert seen == {"seeds": [6, 7, 8, 9, 10, 11], "bits": (4, 8, 4), "rotation": 9, "calibration": 1}


def test_a_row_of_another_default_is_measured_again(accuracy, monkeypatch):
    def wanted():
        return {"setting": "w4a4kv4-rtn", "seed": 0, "options": accuracy.digest_of("w4a4kv4-rtn", 0, options())}

    row = {**wanted(), "windows": 4}
    assert accuracy.is_measured([row], {**wanted(), "windows": 4})
    defaults = QuarotConfig._default_clips
    monkeypatch.setattr(QuarotConfig, "_default_clips", lambda self: {**defaults(self), "w_clip_norm": 8.0})
    assert not accuracy.is_measured([row], {**wanted(), "windows": 4})
    del row["options"]
    assert accuracy.is_measured([row], {**wanted(), "windows": 4})
