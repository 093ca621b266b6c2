"""Options that say how to rotate and quantise, shared by the commands that do it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quarot.config import QuarotConfig

_BITS = {
    "w": "weights: 2-8, 16",
    "a": "activations: 4, 6, 8, 16",
    "k": "cached keys: 2, 3, 4, 8, 16",
    "v": "values: as keys",
}


_ROTATION = {
    "r1": "hadamard",
    "o_proj_online": "heads",
    "down_proj_block": None,
    "no_r2": False,
    "no_r3": False,
    "no_r4": False,
}
"""Options that say how to rotate, and their defaults."""


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Rotation and quantisation options; the defaults are the paper's W4A4KV4 GPTQ recipe."""
    group = parser.add_argument_group("quantisation (default: the paper's W4A4KV4, GPTQ)")
    for letter, text in _BITS.items():
        group.add_argument(f"--{letter}-bits", type=int, metavar="N", help=f"bits of {text}")
    group.add_argument("--kv-bits", type=int, metavar="N", help="bits of keys and values alike")
    group.add_argument("--method", choices=("gptq", "rtn"), help="weights: GPTQ (calibrated), or round to nearest")
    group.add_argument("--group-size", type=int, metavar="N", help="inputs that share a weight scale (default: all)")
    group.add_argument("--preset", metavar="NAME", help="paper (default), layerwise, or best: slower to make")
    group.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="any field of QuarotConfig, the value as JSON"
    )
    group = parser.add_argument_group("rotation")
    group.add_argument("--no-rotate", action="store_true", help="quantise the model as it is")
    group.add_argument("--r1", choices=("hadamard", "orthogonal", "none"), default="hadamard", help="residual stream")
    group.add_argument("--o-proj-online", choices=("heads", "full", "none"), default="heads", help="input of o_proj")
    group.add_argument("--down-proj-block", type=int, metavar="N", help="block-diagonal R4 of this width")
    group.add_argument("--no-r2", action="store_true", help="leave values unrotated")
    group.add_argument("--no-r3", action="store_true", help="leave queries and keys unrotated")
    group.add_argument("--no-r4", action="store_true", help="leave the input of down_proj unrotated")
    group.add_argument("--seed", type=int, default=0, help="of the rotation and the calibration windows (default 0)")
    group = parser.add_argument_group("calibration (GPTQ)")
    group.add_argument("--calibration", default="wikitext2", metavar="TEXT", help="wikitext2, pydoc, or a text file")
    group.add_argument("--samples", type=int, metavar="N", help="token windows (default 128)")
    group.add_argument("--length", type=int, metavar="N", help="tokens a window (default 2048)")


def config_of(options: argparse.Namespace) -> QuarotConfig:
    """The QuarotConfig that the options describe.

    Raises:
        ValueError: a bad value, with the field's name.
    """
    from quarot.quantization.presets import with_preset

    fields: dict[str, Any] = {"seed": options.seed}
    if options.kv_bits is not None:
        fields["k_bits"] = fields["v_bits"] = options.kv_bits
    names = {
        "w_bits": options.w_bits, "a_bits": options.a_bits, "k_bits": options.k_bits, "v_bits": options.v_bits,
        "w_method": options.method, "w_group_size": options.group_size,
        "calibration_samples": options.samples, "calibration_length": options.length,
    }  # fmt: skip
    fields.update({name: value for name, value in names.items() if value is not None})
    for entry in options.set:
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise ValueError(f"--set {entry}: write FIELD=VALUE")
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            fields[name] = value
    try:
        return with_preset(None, options.preset, fields)
    except TypeError as error:
        raise ValueError(f"--set: {error}") from None


def needs_calibration(config: QuarotConfig) -> bool:
    """Whether quantising by this configuration looks at data."""
    settings = [{}, *config.overrides.values()]
    gptq = any(
        own.get("w_bits", config.w_bits) < 16 and own.get("w_method", config.w_method) == "gptq" for own in settings
    )
    budget = config.w_bits_budget is not None or config.finds_kv_bits
    return (
        gptq or budget or config.a_clip_search or max(config.tune_steps, config.layer_steps, config.rotation_steps) > 0
    )


def rotation_of(options: argparse.Namespace) -> dict[str, Any] | None:
    """The switches of ``rotate_model`` that the options describe, or None with ``--no-rotate``.

    Raises:
        ValueError: a switch beside ``--no-rotate``.
    """
    if options.no_rotate:
        for name, default in _ROTATION.items():
            if getattr(options, name) != default:
                raise ValueError(f"--{name.replace('_', '-')} says how to rotate, and --no-rotate not to; drop one")
        return None
    return {
        "seed": options.seed,
        "r1": None if options.r1 == "none" else options.r1,
        "r2": not options.no_r2,
        "o_proj_online": options.o_proj_online,
        "r3": not options.no_r3,
        "r4": not options.no_r4,
        "down_proj_block": options.down_proj_block,
    }


def rotate(model: Any, options: argparse.Namespace, device: Any = None) -> Any:
    """Rotate as the options say; returns the plan, or None with ``--no-rotate``."""
    import quarot

    switches = rotation_of(options)
    if switches is None:
        return None
    return quarot.rotate_model(model, **switches, device=device, progress=not options.quiet)
