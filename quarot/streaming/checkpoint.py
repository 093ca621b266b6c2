"""A checkpoint on disk: the model of its configuration without weights, and its tensors, read when they are wanted."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from quarot.architectures import architecture_of
from quarot.integrations.checkpoint_folder import check_source, no_missing_shard, read_config
from quarot.integrations.safetensors_header import StoredTensor, read_header

logger = logging.getLogger("quarot")

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_OTHER_COPIES = ["consolidated*", "original/*"]
"""Where some repositories keep the weights a second time, in their authors' own format."""
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


_COMPUTED = ("rotary_emb.inv_freq", "position_ids")
"""Buffers that old checkpoints hold and transformers computes."""


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
        ValueError: config.json, the index or a weight file is damaged.
        FileNotFoundError: no such folder, or a weight file that the index names is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_source(path)
        self.folder = _folder(path)
        read_config(self.folder)
        index = self.folder / "model.safetensors.index.json"
        single = self.folder / "model.safetensors"
        if index.is_file():
            self.files: dict[str, str] = _weight_map(index)
        elif single.is_file():
            self.files = dict.fromkeys(read_header(single), single.name)
        else:
            raise CannotStream(f"{self.folder} has no model.safetensors, sharded or whole")
        self._stored: dict[str, StoredTensor] = {}
        with no_missing_shard(self.folder):
            for name in sorted(set(self.files.values())):
                self._stored |= read_header(self.folder / name)

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
        for stored in self._stored.values():
            if stored.dtype in _DTYPES:
                return _DTYPES[stored.dtype]
        return torch.get_default_dtype()

    def empty_model(self, dtype: torch.dtype | str = "auto") -> Any:
        """The model with its weights on the meta device and its buffers computed, in evaluation mode.

        Raises:
            ValueError: ``dtype`` is neither "auto" nor a dtype.
        """
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        config = AutoConfig.from_pretrained(self.folder)
        kind = self.dtype(config) if dtype == "auto" else dtype
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"dtype={dtype!r} is neither 'auto' nor a torch.dtype")
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=kind)
        if (self.folder / "generation_config.json").is_file() and model.can_generate():
            model.generation_config = GenerationConfig.from_pretrained(self.folder)
        return model.eval()

    def check_names(self, model: Any) -> None:
        """Compare what is stored with the parameters of the empty model; tensors that none of them reads are logged.

        Raises:
            CannotStream: a parameter is not stored, or not under a name that is known here.
            ValueError: it is stored in 8 bits or fewer, which mean nothing without their scales.
        """
        tied = tied_names(model)
        shapes = {name: p.shape for name, p in model.named_parameters(remove_duplicate=False) if name not in tied}
        parts = (part for name, shape in shapes.items() for part in self._parts(model, name, shape))
        read = {name for part in parts for name in part}
        missing = sorted(read - set(self.files))
        if missing:
            raise CannotStream(
                f"{self.folder} stores no {', '.join(missing[:3])}{', ..' if len(missing) > 3 else ''}:"
                " it is incomplete, or transformers renames its tensors while loading"
            )

        for name in sorted(read):
            if name in self._stored and self._stored[name].dtype not in _DTYPES:
                raise ValueError(
                    f"{self.folder / self.files[name]} holds {name} in {self._stored[name].dtype}; "
                    "convert the checkpoint to bfloat16 first"
                )
        unread = sorted(name for name in set(self.files) - read - tied if not name.endswith(_COMPUTED))
        if unread:
            logger.warning(
                "%s holds %d tensors that a %s with its config.json does not have; they are left out: %s%s",
                self.folder, len(unread), type(model).__name__, ", ".join(unread[:3]), ", .." if unread[3:] else "",
            )  # fmt: skip

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


def _weight_map(index: Path) -> dict[str, str]:
    """Of every tensor, the file that holds it."""
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is corrupt or truncated: {error!r}; download it again") from None


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
