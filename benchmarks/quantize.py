"""Quantising a checkpoint from disk, layer by layer: GPTQ with the paper's 128 windows of 2048 tokens, and rounding.

m = calibration windows, n = tokens in each; ``us`` is the whole call, reading and writing included. Weights are random.
Of a 70B shape three layers are made: ``s_per_layer`` (median) says what eighty take.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import quarot
from benchmarks.report import Row
from benchmarks.shapes import SHAPES, Options, Shape
from quarot.bench.shapes import config_of
from quarot.bench.subjects import release
from quarot.runtime.synthetic import random_model

LAYERS = {"llama-2-7b": 32, "llama-2-70b": 3}
WINDOWS, LENGTH = 128, 2048


def rows(options: Options) -> Iterator[Row]:
    for name, layers in LAYERS.items():
        if name in options.models and not (options.quick and layers < SHAPES[name].layers):
            with tempfile.TemporaryDirectory() as folder:
                source = Path(folder) / "source"
                _write(SHAPES[name], layers, source)
                for method in ("rtn", "gptq"):
                    yield _quantize(SHAPES[name], layers, method, source, Path(folder) / method)


def _write(shape: Shape, layers: int, folder: Path) -> None:
    model = random_model(config_of(shape, layers), dtype=torch.float16, device="cuda")
    model.save_pretrained(folder, max_shard_size="4GB")
    del model
    release(torch.device("cuda"))


def _quantize(shape: Shape, layers: int, method: str, source: Path, out: Path) -> Row:
    windows = torch.randint(3, shape.vocab, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(0))
    release(torch.device("cuda"))
    start = time.time()
    quarot.quantize_checkpoint(source, out, calibration=windows, w_method=method, device="cuda", progress=False)
    seconds = time.time() - start
    # Every layer is a shard: when it was written says how long it took. The last one moves no hidden states on.
    written = sorted(file.stat().st_mtime for file in out.glob("*.safetensors"))[: layers - 1]
    steps = [after - before for before, after in itertools.pairwise(written)]
    return Row(
        "quantize",
        shape.model,
        method,
        m=WINDOWS if method == "gptq" else None,
        n=LENGTH if method == "gptq" else None,
        dtype="float16",
        us=seconds * 1e6,
        layers=layers,
        s_per_layer=round(statistics.median(steps), 2),
        peak_gb=round(torch.cuda.max_memory_allocated() / 1e9, 1),
    )
