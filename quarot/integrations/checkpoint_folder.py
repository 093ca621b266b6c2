"""What a path must be before a model is loaded from it, so that what is wrong is said of the path and not of a hub."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONFIG = "config.json"


def check_source(path: str | os.PathLike[str]) -> None:
    """Check that ``path`` is a folder with a model in it, or may be the name of a repository.

    Raises:
        FileNotFoundError: it is written like a folder, and there is none.
        ValueError: it is a file, or a folder without config.json.
        TypeError: it is no path at all.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"a folder or the name of a repository is wanted, not {path!r}")
    text, folder = os.fspath(path), Path(path)
    like_a_folder = isinstance(path, os.PathLike) or text.startswith((".", "/", "~")) or text.count("/") > 1
    if not text or (like_a_folder and not folder.exists()):
        raise FileNotFoundError(f"{text!r}: no such folder")
    if folder.is_file():
        raise ValueError(f"{text} is a file; give the folder that holds the model")
    if folder.is_dir() and not (folder / CONFIG).is_file():
        raise ValueError(f"{text} is a folder without {CONFIG}: not a model")


@contextmanager
def no_missing_shard(path: str | os.PathLike[str]) -> Iterator[None]:
    """Say of a weight file that the index names and nobody finds what to do about it."""
    try:
        yield
    except FileNotFoundError as error:
        if ".safetensors" not in str(error):
            raise
        raise FileNotFoundError(
            f"{path}: model.safetensors.index.json names a file that is missing ({error}); "
            "copy or save the checkpoint again"
        ) from None


def read_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """config.json of a local folder; empty for names of repositories.

    Raises:
        ValueError: it is not JSON, not an object, or its ``quantization_config`` is none.
    """
    file = Path(folder) / CONFIG
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}; copy or save the model again") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}, not a JSON object; copy or save the model again")
    quantization = config.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise ValueError(f"{file}: quantization_config is {quantization!r}, not a JSON object")
    return config
