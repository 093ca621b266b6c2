"""What an interrupted ``quantize_model`` leaves behind: one safetensors file a finished layer, and a fingerprint.

``fingerprint.json`` tells which model, configuration and calibration windows the folder belongs to; another run that
finds a different one stops instead of mixing two. Files are written beside their place and renamed, so that a kill at
any moment leaves whole files only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from quarot import __version__
from quarot.config import QuarotConfig
from quarot.quantization.grid import QuantizedWeight
from quarot.writable import writing

FINGERPRINT = "fingerprint.json"
_SAMPLED = 4096


class FinishedLayer(NamedTuple):
    """What a decoder layer became, by path inside it: codes, searched activation clips, weights before rounding,
    corrected biases, and the tokens of experts that calibration hardly reached.
    """

    results: dict[str, QuantizedWeight]
    clips: dict[str, float]
    latents: dict[str, torch.Tensor]
    biases: dict[str, torch.Tensor]
    starved: dict[str, int]


class ProgressStore:
    """The finished layers in one folder.

    Raises:
        ValueError: the folder belongs to another model, configuration or calibration set.
    """

    def __init__(self, folder: str | os.PathLike[str], fingerprint: dict[str, Any]) -> None:
        self.folder = Path(folder)
        check_fingerprint(self.folder, fingerprint)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def load_tensors(self, name: str) -> dict[str, torch.Tensor] | None:
        """What :meth:`save_tensors` wrote under that name, or None."""
        if not self._path(name).exists():
            return None
        with intact(self._path(name)):
            return load_file(self._path(name))

    def save_tensors(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write tensors that belong to no layer."""
        self._write(name, tensors, None)

    def load(self, name: str) -> FinishedLayer | None:
        """The layer of that name, or None when it is not finished."""
        if not self._path(name).exists():
            return None
        with intact(self._path(name)), safe_open(self._path(name), framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            clips, starved = (json.loads(file.metadata()[key]) for key in ("clips", "starved"))

        def kind(name: str) -> dict[str, torch.Tensor]:
            return {key.removesuffix(":" + name): t for key, t in tensors.items() if key.endswith(":" + name)}

        scales, zeros = kind("scale"), kind("zero")
        results = {path: QuantizedWeight(c, scales[path], zeros.get(path)) for path, c in kind("codes").items()}
        return FinishedLayer(results, clips, kind("latent"), kind("bias"), starved)

    def save(self, name: str, layer: FinishedLayer) -> None:
        """Write one finished layer."""
        tensors = {f"{path}:latent": latent for path, latent in layer.latents.items()}
        tensors |= {f"{path}:bias": bias for path, bias in layer.biases.items()}
        for path, result in layer.results.items():
            tensors |= {f"{path}:{key}": tensor for key, tensor in result._asdict().items() if tensor is not None}
        self._write(name, tensors, {"clips": json.dumps(layer.clips), "starved": json.dumps(layer.starved)})

    def _write(self, name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> None:
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        temporary = self._path(name).with_suffix(".tmp")
        with writing(temporary):
            save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, self._path(name))


def kept(
    store: ProgressStore | None, name: str, compute: Callable[[], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """What an interrupted run kept under ``name``; else computed, and kept where there is a store."""
    found = None if store is None else store.load_tensors(name)
    if found is None:
        found = compute()
        if store is not None:
            store.save_tensors(name, found)
    return found


@contextmanager
def intact(path: Path) -> Iterator[None]:
    """Reading a file of an interrupted run: whatever is wrong with it becomes a ValueError with the way out."""
    try:
        yield
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); delete it and run again, what it held is computed anew"
        ) from None


def check_fingerprint(folder: Path, fingerprint: dict[str, Any]) -> None:
    """Make a folder of this run out of a new one; raise ValueError where it belongs to another run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FINGERPRINT
    if path.exists():
        try:
            found = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); delete its folder and run again") from None
        differing = [_difference(key, found.get(key), own) for key, own in fingerprint.items() if found.get(key) != own]
        if differing:
            raise ValueError(
                f"{folder} holds a run with {' and '.join(sorted(differing))}; delete it or choose another folder"
            )
    else:
        if any(folder.glob("*.safetensors")):
            raise ValueError(
                f"{folder} has weight files but no {FINGERPRINT}: it is not that of an unfinished run, or which "
                "run is unknown; choose another folder"
            )
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(fingerprint, indent=1))
        os.replace(temporary, path)


def _difference(key: str, found: Any, own: Any) -> str:
    """``another model``; of the configuration the fields that differ: ``w_bits=4 instead of 8``."""
    if not isinstance(found, dict) or not isinstance(own, dict):
        return f"another {key}"
    return ", ".join(_differing_fields("", found, own))


def _differing_fields(prefix: str, found: dict[str, Any], own: dict[str, Any]) -> Iterator[str]:
    for name in sorted({*found, *own}):
        one, other = found.get(name), own.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differing_fields(f"{prefix}{name}.", one, other)
        elif one != other:
            yield f"{prefix}{name}={one!r:.60} instead of {other!r:.60}"


def fingerprint(weights: str, config: QuarotConfig, windows: torch.Tensor | None) -> dict[str, Any]:
    """What a run's result depends on: the configuration, and hashes of the rest; ``weights`` is that of the model."""
    tokens = b"" if windows is None else windows.contiguous().numpy().tobytes()
    return {
        "quarot version": __version__,
        "configuration": json.loads(json.dumps(config.to_dict())),
        "model": weights,
        "calibration text": hashlib.sha256(tokens).hexdigest(),
    }


def weights_hash(model: nn.Module) -> str:
    """A hash of a model in memory; of every weight up to 4096 evenly spaced elements count."""
    weights = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // _SAMPLED)].float().cpu().contiguous()
        weights.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        weights.update(sample.numpy().tobytes())
    return weights.hexdigest()
