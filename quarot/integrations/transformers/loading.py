"""``quarot.load``: a saved quarot model, and nothing else."""

from __future__ import annotations

import json
import os
from typing import Any

from quarot.integrations.checkpoint_folder import check_source, no_missing_shard, read_config
from quarot.memory import out_of_memory


def load(path: str | os.PathLike[str], **kwargs: Any) -> Any:
    """Load a checkpoint that quarot saved: ``AutoModelForCausalLM.from_pretrained`` with quarot imported, and checks.

    Args:
        path: a folder, or the name of a repository on the Hugging Face hub.
        kwargs: passed on (``device_map``, ``dtype``, ...).

    Raises:
        ValueError: not a quarot checkpoint, one of a newer format, or a corrupt or incomplete one; a ``dtype`` that no
            model computes in.
        OSError: nothing to load there.
        TypeError: ``path`` is neither.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    _check_dtype(kwargs.get("dtype", kwargs.get("torch_dtype")))
    if "subfolder" not in kwargs:
        check_source(path)
        read_config(path)
    shared = {k: kwargs[k] for k in ("revision", "token", "cache_dir", "local_files_only", "subfolder") if k in kwargs}
    config = AutoConfig.from_pretrained(path, **shared)
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method != "quarot":
        raise ValueError(
            f"{path} is not a quarot checkpoint (its config.json has quant_method {method!r}); "
            "load it with transformers, or quantise it with quarot.quantize_model"
        )
    lower = "what else is on the device, or spread the layers over devices with device_map='auto'"
    try:
        with out_of_memory(f"loading {path}", lower), no_missing_shard(path):
            return AutoModelForCausalLM.from_pretrained(path, **kwargs)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: model.safetensors.index.json is corrupt or truncated ({error}); copy or save the checkpoint again"
        ) from None


def _check_dtype(dtype: Any) -> None:
    import torch

    kind = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    whole = isinstance(kind, torch.dtype) and kind.is_floating_point and kind.itemsize > 1
    if not (dtype is None or dtype == "auto" or whole):
        raise ValueError(f"dtype={dtype!r} must be 'auto', or a torch.dtype of 16 bits or more, such as torch.bfloat16")
