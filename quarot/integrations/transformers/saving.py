"""``save_pretrained`` that never leaves a half-written folder that loads.

Everything is written to a hidden folder, beside a new target or inside an old one, and forced to disk there: whatever
goes wrong until then (a full disk, an error, a kill) leaves an old checkpoint untouched. Then the files are renamed
into place. A new target appears in one rename. In an old one ``config.json``, without which a folder does not load,
leaves first and arrives last: a kill between the two, a few renames apart, leaves a folder that is refused, neither
the old checkpoint nor the new one. (Swapping whole folders would close that gap, but would not keep the other files of
the folder, nor work where its parent is another file system.)
"""

from __future__ import annotations

import functools
import glob
import os
import re
import shutil
from pathlib import Path
from typing import Any

from quarot.integrations.transformers.card import write_readme, write_remote_code
from quarot.writable import writing

_CONFIG = "config.json"
_SHARD = re.compile(r"model(\.[^.]+)?(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def install(model: Any) -> None:
    """Make ``model.save_pretrained`` the one of this module. Idempotent; survives copies."""
    if "save_pretrained" not in vars(model):
        model.save_pretrained = functools.partial(save_pretrained, model)


def uninstall(model: Any) -> None:
    """Undo :func:`install`."""
    vars(model).pop("save_pretrained", None)


def save_pretrained(
    self: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    remote_code: bool = False,
    **kwargs: Any,
) -> None:
    """As ``PreTrainedModel.save_pretrained``; all its keywords work.

    Args:
        self: the model.
        save_directory: a folder, made if it does not exist; other files in it stay.
        is_main_process: False in all but one process of a distributed job.
        remote_code: also write a module that imports quarot, so that ``trust_remote_code=True`` loads the checkpoint in
            a process that did not.

    Raises:
        FileExistsError: the target is a file.
        OSError: the disk is full or not writable; an old checkpoint in the folder is untouched (unless it is a rename
            that fails: then the folder does not load).
    """
    target = Path(save_directory).absolute()
    if target.is_file():
        raise FileExistsError(f"save_pretrained: {target} is a file, not a folder")
    if not is_main_process:
        type(self).save_pretrained(self, target, is_main_process=False, **kwargs)
        return
    if kwargs.get("push_to_hub"):
        kwargs.setdefault("repo_id", target.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    # Inside a folder that exists: its parent may be another file system, or not be ours to write to.
    partial = (target if target.exists() else target.parent) / f".{target.name}.partial-{os.getpid()}"
    try:
        with writing(target):
            type(self).save_pretrained(self, partial, **kwargs)
        write_readme(partial, target)
        if remote_code:
            write_remote_code(partial, type(self).__name__.removeprefix("Quarot"))
        sync(partial)
        move_into_place(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def move_into_place(partial: Path, target: Path, behind: str | None = None) -> None:
    """Rename the files of ``partial`` into ``target``; other files there (a tokenizer) stay.

    The file named ``behind`` is no part of the checkpoint: it stays in ``partial`` until everything else has moved, and
    is deleted then.
    """
    if not target.exists():
        os.replace(partial, target)
        if behind is not None:
            (target / behind).unlink(missing_ok=True)
        return
    names = sorted(name for name in os.listdir(partial) if name != behind)
    (target / _CONFIG).unlink(missing_ok=True)
    for name in os.listdir(target):
        if _SHARD.fullmatch(name) and name not in names:
            (target / name).unlink()
    for name in [n for n in names if n != _CONFIG] + [_CONFIG]:
        os.replace(partial / name, target / name)
    shutil.rmtree(partial, ignore_errors=True)


def sync(folder: Path) -> None:
    """Force the files to disk: some file systems report a full disk only now."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())


def _remove_leftovers(target: Path) -> None:
    """Delete partial folders of processes that were killed while saving."""
    name = f".{glob.escape(target.name)}.partial-*"
    for path in [*target.parent.glob(name), *target.glob(name)]:
        pid = path.name.rpartition("-")[2]
        if pid == str(os.getpid()) or not _alive(pid):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
