"""The checkpoint that grows: one safetensors shard a finished decoder layer, one for everything else, last the index.

Each shard is written beside its place, forced to disk and renamed. So a kill at any moment leaves whole shards, from
which the next run continues; ``config.json``, without which a folder is no model, comes last.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from quarot.nn.quant_linear import QuantLinear
from quarot.quantization import storage
from quarot.quantization.grid import QuantizedWeight
from quarot.quantization.progress_store import FinishedLayer, check_fingerprint, intact
from quarot.writable import writing


class ShardStore:
    """The shards in one folder, by the name of the decoder layer they hold.

    Args:
        folder: of the unfinished checkpoint.
        names: of the decoder layers, in order.
        fingerprint: what the result depends on (:mod:`quarot.quantization.progress_store`).

    Raises:
        ValueError: the folder belongs to another run.
    """

    def __init__(self, folder: Path, names: list[str], fingerprint: dict[str, Any]) -> None:
        self.folder = folder
        check_fingerprint(folder, fingerprint)
        self._places = {name: index for index, name in enumerate([*names, ""], start=1)}
        self._found: dict[str, dict[str, Any]] = {}

    def path(self, name: str) -> Path:
        """The shard of a decoder layer; of everything else for an empty name."""
        return self.folder / f"model-{self._places[name]:05d}-of-{len(self._places):05d}.safetensors"

    def has(self, name: str) -> bool:
        """Whether that layer is finished."""
        return self.path(name).exists()

    def save(self, name: str, layer: FinishedLayer) -> None:
        """Remember what the modules will not hold; :meth:`write` follows when the layer is packed."""
        self._found[name] = {"clips": layer.clips, "starved": layer.starved}

    def write(
        self,
        name: str,
        tensors: dict[str, torch.Tensor],
        module: nn.Module | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        """Write one shard: ``tensors`` by their names in the model, and what :meth:`load` needs of ``module``.

        ``metadata`` is noted in it besides: what is known only once all layers are finished.
        """
        weights = {
            path: [linear.out_features, linear.in_features, linear.w_bits]
            for path, linear in (() if module is None else module.named_modules())
            if isinstance(linear, QuantLinear) and linear.w_bits < 16
        }
        notes = json.dumps({"weights": weights, **self._found.pop(name, {})})
        temporary = self.path(name).with_suffix(".tmp")
        stored = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        with writing(temporary):
            save_file(stored, temporary, metadata={"format": "pt", "quarot": notes, **(metadata or {})})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, self.path(name))

    def load(self, name: str) -> FinishedLayer | None:
        """The layer of that name as :class:`~quarot.quantization.layer.LayerQuantizer` adopts it, or None."""
        if not self.has(name):
            return None
        results, biases = {}, {}
        with intact(self.path(name)), safe_open(self.path(name), framework="pt") as file:
            notes = json.loads(file.metadata()["quarot"])
            stored = set(file.keys())

            def get(path: str, kind: str) -> torch.Tensor | None:
                key = f"{name}.{path}.{kind}"
                return file.get_tensor(key) if key in stored else None

            for path, (n, k, bits) in notes["weights"].items():
                codes = storage.load(get(path, "qweight"), n, k, bits)
                results[path] = QuantizedWeight(codes, get(path, "weight_scale"), get(path, "weight_zero"))
                bias = get(path, "bias")
                if bias is not None:
                    biases[path] = bias
        return FinishedLayer(results, notes["clips"], {}, biases, notes["starved"])

    def write_index(self) -> None:
        """Write the index over all shards.

        Raises:
            RuntimeError: one is missing.
        """
        places: dict[str, str] = {}
        total = 0
        for name in self._places:
            if not self.has(name):
                raise RuntimeError(f"{self.path(name)} was never written")
            with intact(self.path(name)), safe_open(self.path(name), framework="pt") as file:
                places |= dict.fromkeys(file.keys(), self.path(name).name)
            total += self.path(name).stat().st_size
        index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        path = self.folder / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
