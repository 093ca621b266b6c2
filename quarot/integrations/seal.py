"""What the numbers of a checkpoint mean, written beside them in the weight files, so another config.json shows.

config.json decides how codes are read: most exchanges change a shape and are refused for it, but another rotation of
equal sizes, a clip ratio or the bits of the cache fit any weights and give wrong numbers. Weight files therefore hold
these settings as metadata. Files without them, from before or rewritten by other tools, load unchecked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from typing import Any

from quarot.config import QuarotConfig
from quarot.integrations.safetensors_header import read_metadata
from quarot.rotation.plan import RotationPlan

KEY = "quarot_settings"
"""The entry of a safetensors file's metadata; its value is JSON."""

_FIELDS = (
    "w_bits", "w_group_size", "w_symmetric", "a_bits", "a_clip", "a_group_size", "k_bits", "v_bits", "kv_group_size",
    "k_clip", "v_clip", "kv_bits_by_layer", "lm_head_bits", "ignore", "overrides",
)  # fmt: skip
_LONGEST = 200
"""Characters of JSON; of anything longer (the overrides of every layer) a hash is kept."""


def seal(config: QuarotConfig) -> dict[str, str]:
    """Metadata for the weight files of a model with this configuration."""
    return {KEY: json.dumps(_settings(config), sort_keys=True)}


def check_seal(config: QuarotConfig, files: Iterable[str | os.PathLike[str]] | None) -> None:
    """Compare the configuration that will read the safetensors ``files`` with what they were written for.

    Raises:
        ValueError: a setting differs (named, with both values), or a file is damaged.
    """
    own = json.loads(json.dumps(_settings(config)))
    for file in files or ():
        if not os.fspath(file).endswith(".safetensors"):
            continue
        written = _written(file)
        differing = [name for name in sorted(written) if name in own and own[name] != written[name]]
        if differing:
            values = "; ".join(f"{name}={written[name]!r}, not {own[name]!r}" for name in differing)
            raise ValueError(
                f"{file} was written for other settings than its config.json has: {values}. Bring back the config.json "
                "that was saved with it (bits of the cache are changed in a loaded model, by "
                "quarot.integrations.transformers.attach(model, model.config.quantization_config.replace(k_bits=...)))"
            )


def _written(file: str | os.PathLike[str]) -> dict[str, Any]:
    """What a file notes; nothing, where it notes nothing."""
    text = read_metadata(file).get(KEY, "{}")
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is corrupt: its {KEY} are no JSON object ({error}); copy it again") from None


def _settings(config: QuarotConfig) -> dict[str, Any]:
    """The fields that the arithmetic depends on, one entry for each part of the rotation."""
    fields = {name: getattr(config, name) for name in _FIELDS}
    given = config.rotation
    plan = {} if given is None else RotationPlan.from_dict(given).to_dict()
    parts = (field.name for field in dataclasses.fields(RotationPlan) if field.name != "notes")
    return {name: _short(value) for name, value in (fields | {f"rotation.{p}": plan.get(p) for p in parts}).items()}


def _short(value: Any) -> Any:
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= _LONGEST else f"{hashlib.sha256(text.encode()).hexdigest()[:16]} (a hash)"
