"""A checkpoint on disk: the model of its configuration without weights, and its tensors, read when they are wanted."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_HALVES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


class CannotStream(NotImplementedError):
    """This checkpoint, or what is to be done to it, needs the whole model in memory; the message says why."""


class Checkpoint:
    """The safetensors files of a full-precision model.

    Tensors are read through memory maps that are closed again, so neither the process nor the page cache has to hold
    more than what is being read.

    Args:
        path: a folder, or a repository on the Hugging Face hub (downloaded first).

    Raises:
        CannotStream: no safetensors files there, or nothing at all.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.folder = _folder(path)
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if index.is_file():
            self.files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        elif single.is_file():
            with safe_open(single, framework="pt") as file:
                self.files = dict.fromkeys(file.keys(), single.name)
        else:
            raise CannotStream(f"{self.folder} has no model.safetensors, sharded or whole")

    @property
    def nbytes(self) -> int:
        """Bytes of the weight files."""
        return sum((self.folder / name).stat().st_size for name in sorted(set(self.files.values())))

    def fingerprint(self) -> str:
        """A hash of the names of all tensors and of the sizes and evenly spaced samples of all files."""
        found = hashlib.sha256(json.dumps(self.files, sort_keys=True).encode())
        for name in sorted(set(self.files.values())):
            size = (self.folder / name).stat().st_size
            found.update(f"{name} {size}".encode())
            with open(self.folder / name, "rb") as file:
                for start in range(0, size, max(size // _SAMPLES, _SAMPLE_BYTES)):
                    file.seek(start)
                    found.update(file.read(_SAMPLE_BYTES))
        return found.hexdigest()

    def dtype(self, config: Any) -> torch.dtype:
        """What ``dtype="auto"`` means: that of the configuration, else that of the first floating-point tensor."""
        stated = getattr(config, "dtype", None)
        if stated is not None:
            return stated if isinstance(stated, torch.dtype) else getattr(torch, str(stated).removeprefix("torch."))
        for name, file in self.files.items():
            with safe_open(self.folder / file, framework="pt") as tensors:
                kind = tensors.get_slice(name).get_dtype()
            if kind in _HALVES:
                return _HALVES[kind]
        return torch.get_default_dtype()

    def empty_model(self, dtype: torch.dtype | str = "auto") -> Any:
        """The model with its weights on the meta device and its buffers computed, in evaluation mode."""
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        config = AutoConfig.from_pretrained(self.folder)
        kind = self.dtype(config) if isinstance(dtype, str) else dtype
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=kind)
        if (self.folder / "generation_config.json").is_file() and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(self.folder)
        return model.eval()

    def check_names(self, names: Iterable[str]) -> None:
        """Raise CannotStream unless every tensor is stored under this very name."""
        missing = sorted(set(names) - set(self.files))
        if missing:
            raise CannotStream(
                f"{self.folder} stores no {', '.join(missing[:3])}{', ..' if len(missing) > 3 else ''}:"
                " it is incomplete, or transformers renames its tensors while loading"
            )

    @torch.no_grad()
    def fill(self, module: nn.Module, names: Iterable[str], prefix: str, device: torch.device) -> None:
        """Give parameters of ``module`` their stored values, on ``device``, in the dtype they have.

        Args:
            module: part of the empty model.
            names: of the parameters, inside it.
            prefix: in front of them in the checkpoint.

        Raises:
            ValueError: a file is damaged, or a tensor has another shape.
        """
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.files[prefix + name], []).append(name)
        for file, members in by_file.items():
            try:
                with safe_open(self.folder / file, framework="pt") as tensors:
                    for name in members:
                        _set(module, name, tensors.get_tensor(prefix + name), device, prefix)
            except OSError:
                raise
            except Exception as error:
                if isinstance(error, (ValueError, torch.OutOfMemoryError)):
                    raise
                raise ValueError(f"{self.folder / file} is damaged or truncated: {error}; download it again") from None


def _set(module: nn.Module, path: str, value: torch.Tensor, device: torch.device, prefix: str) -> None:
    place, _, name = path.rpartition(".")
    owner = module.get_submodule(place)
    empty = owner.get_parameter(name)
    if value.shape != empty.shape:
        raise ValueError(
            f"{prefix}{path} is {list(value.shape)} in the checkpoint; its config.json says {list(empty.shape)}"
        )
    # A copy always: what safetensors returns on a CPU is the file itself, mapped.
    owner.register_parameter(name, nn.Parameter(value.to(device, empty.dtype, copy=True), requires_grad=False))


def _folder(path: str | os.PathLike[str]) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(os.fspath(path), allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError) as error:
        raise CannotStream(f"{path} is no folder, and downloading it failed: {error}") from None
