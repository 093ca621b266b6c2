"""Where results will be written, tried before the work: minutes or hours must not end at a folder that is not ours.

And what is said when it fails all the same.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Writing tensors to ``path``: safetensors has an exception of its own for a full disk, which names no file.

    Raises:
        OSError: instead of it.
    """
    try:
        yield
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written ({error}); make room, or write elsewhere, and run again") from error


def check_folder(folder: Path, option: str) -> None:
    """Make the folder's parent, and check that the folder can be made there, or written to where it exists.

    Raises:
        FileExistsError: it is a file.
        ValueError: with the option's name and the reason.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{option} {folder} is a file, not a folder")
    _try(folder if folder.exists() else folder.absolute().parent, f"{option} {folder}")


def check_apart(source: str | os.PathLike[str], folder: Path, option: str) -> None:
    """Raise ValueError where ``folder`` is the source itself, which would be lost."""
    if folder.exists() and os.path.exists(source) and os.path.samefile(source, folder):
        raise ValueError(f"{option} {folder} is the folder of the original model; write to another one")


def check_file(file: Path, option: str) -> None:
    """Make the file's folder, and check that files can be made there.

    Raises:
        ValueError: with the option's name and the reason.
    """
    if file.is_dir():
        raise ValueError(f"{option} {file} is a folder; name a file")
    _try(file.absolute().parent, f"{option} {file}")


def _try(folder: Path, what: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{what}: cannot write to {folder}: {error.strerror or error}") from None
