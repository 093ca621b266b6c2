"""A disk that fills up amid the work: an OSError with the path, nothing half-written in its place, and a way on."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import quarot

RTN: dict[str, Any] = {"w_method": "rtn", "progress": False}


@contextmanager
def full_disk(size: int = 50_000) -> Iterator[None]:
    """No file of this process can grow beyond ``size`` bytes (what the system then says is "File too large")."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_saving_over_a_checkpoint(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = quarot.quantize_model(tiny_model("llama"), **RTN)
    model.save_pretrained(tmp_path / "m")
    before = contents(tmp_path / "m")
    other = quarot.quantize_model(tiny_model("llama", seed=1), w_bits=8, **RTN)
    with full_disk(), pytest.raises(OSError, match=r"m cannot be written \(.*; make room"):
        other.save_pretrained(tmp_path / "m")
    assert contents(tmp_path / "m") == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_streaming(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "source")
    with full_disk(), pytest.raises(OSError, match=r"model-00001-of-00003.tmp cannot be written \(.*run again"):
        quarot.quantize_checkpoint(tmp_path / "source", tmp_path / "out", **RTN)
    assert not (tmp_path / "out").exists()
    quarot.quantize_checkpoint(tmp_path / "source", tmp_path / "out", **RTN)
    assert not [path for path in (tmp_path / "out").iterdir() if path.suffix == ".tmp"]


def test_keeping_finished_layers(tiny_model: Callable[..., Any], tmp_path: Path) -> None:
    model = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with full_disk(), pytest.raises(OSError, match=r"layers.0.tmp cannot be written"):
        quarot.quantize_model(model, resume_dir=tmp_path, **RTN)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    quarot.quantize_model(model, resume_dir=tmp_path, **RTN)
