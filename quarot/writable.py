"""Where a command will write, tried before its work: minutes or hours must not end at a folder that is not ours."""

from __future__ import annotations

import tempfile
from pathlib import Path


def check_folder(folder: Path, option: str) -> None:
    """Make the folder's parent, and check that the folder can be made there, or written to where it exists.

    Raises:
        FileExistsError: it is a file.
        ValueError: with the option's name and the reason.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{option} {folder} is a file, not a folder")
    _try(folder if folder.exists() else folder.absolute().parent, f"{option} {folder}")


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
