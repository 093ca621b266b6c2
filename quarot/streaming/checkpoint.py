"""A checkpoint on disk: the model of its configuration without weights, and its tensors, read when they are wanted."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from quarot.architectures import architecture_of

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_OTHER_COPIES = ["consolidated*", "original/*"]
"""Where some repositories keep the weights a second time, in their authors' own format."""
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


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
            if kind in _DTYPES:
                return _DTYPES[kind]
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

    def check_names(self, model: Any) -> None:
        """Raise CannotStream unless every parameter of the empty model is stored, under names that are known here."""
        tied = tied_names(model)
        shapes = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False) if name not in tied}
        parts = (part for name, shape in shapes.items() for part in self._parts(model, name, shape))
        missing = sorted({name for part in parts for name in part} - set(self.files))
        if missing:
            raise CannotStream(
                f"{self.folder} stores no {', '.join(missing[:3])}{', ..' if len(missing) > 3 else ''}:"
                " it is incomplete, or transformers renames its tensors while loading"
            )

    @torch.no_grad()
    def fill(self, model: Any, names: Iterable[str], device: torch.device) -> None:
        """Give parameters of the empty model their stored values, on ``device``, in the dtype they have.

        Raises:
            ValueError: a file is damaged, or a tensor has another shape.
        """
        with ExitStack() as stack:
            opened: dict[str, Any] = {}

            def stored(name: str) -> torch.Tensor:
                path = self.folder / self.files[name]
                try:
                    if path.name not in opened:
                        opened[path.name] = stack.enter_context(safe_open(path, framework="pt"))
                    return opened[path.name].get_tensor(name)
                except SafetensorError as error:
                    raise ValueError(f"{path} is damaged or truncated: {error}; download it again") from None

            for name in names:
                empty = model.get_parameter(name)
                value = torch.empty(empty.shape, dtype=empty.dtype, device=device)
                _copy(value, self._parts(model, name, empty.shape), stored)
                owner = model.get_submodule(name.rpartition(".")[0])
                owner.register_parameter(name.rpartition(".")[2], nn.Parameter(value, requires_grad=False))

    def _parts(self, model: Any, name: str, shape: Sequence[int]) -> list[list[str]]:
        """The stored tensors that a parameter is made of, by expert and then along the outputs; mostly itself alone."""
        place = architecture_of(model).experts
        if name in self.files or place is None:
            return [[name]]
        prefix, _, own = name.partition(f".{place.module}.")
        gate, up, down = place.stored
        merged = {place.gate_up: (gate, up), place.down: (down,)}.get(own)
        block = f"{prefix}.{place.stored_block}"
        if merged is None:
            return [[name.replace(f".{place.module.split('.')[0]}.", f".{place.stored_block}.")]]
        return [[f"{block}.experts.{index}.{part}.weight" for part in merged] for index in range(shape[0])]


def tied_names(model: Any) -> set[str]:
    """Names of parameters that are stored under another name."""
    if not model.config.get_text_config().tie_word_embeddings:
        return set()
    return set(getattr(model, "all_tied_weights_keys", None) or {})


def _copy(value: torch.Tensor, parts: list[list[str]], stored: Callable[[str], torch.Tensor]) -> None:
    """Fill ``value`` from its parts; each of several fills a slice of the first dimension."""
    for index, names in enumerate(parts):
        place, row = value[index] if len(parts) > 1 or value.dim() == 3 else value, 0
        for name in names:
            tensor = stored(name)
            target = place[row : row + tensor.shape[0]] if len(names) > 1 else place
            if tensor.shape != target.shape:
                raise ValueError(
                    f"{name} is {list(tensor.shape)} in the checkpoint; its config.json says {list(target.shape)}"
                )
            target.copy_(tensor)
            row += tensor.shape[0]


def _folder(path: str | os.PathLike[str]) -> Path:
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                os.fspath(path), allow_patterns=["*.json", "*.safetensors"], ignore_patterns=_OTHER_COPIES
            )
        )
    except (OSError, ValueError) as error:
        raise CannotStream(f"{path} is no folder, and downloading it failed: {error}") from None
