"""The setuptools commands: build_ext through ninja, and ``quarot/_build_info.py`` that says what was built and why."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

from .architectures import Selection, selection
from .compile import compile_extension
from .toolkit import BuildError, Toolkit, find_toolkit

ROOT = Path(__file__).resolve().parent.parent
MODULE = "quarot._C"


def _mode() -> str:
    mode = os.environ.get("QUAROT_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        raise SystemExit(f"error: QUAROT_CUDA={mode!r} is not one of auto, 1, 0")
    return mode


def _say(reason: str) -> None:
    print(f"\n{'*' * 80}\nquarot: installing WITHOUT the CUDA extension: {reason}\n{'*' * 80}\n", flush=True)


_COMPILES_NOTHING = {"sdist", "egg_info", "dist_info"}  # setup.py commands that need no compiler


def plan() -> tuple[list[Extension], str]:
    """The extensions to build (one or none) and, for none, the reason.

    Raises:
        SystemExit: ``QUAROT_CUDA=1`` and the extension cannot be built.
    """
    mode = _mode()
    if mode == "0":
        return [], "QUAROT_CUDA=0 was set when it was installed"
    try:
        find_toolkit()
        selection()
    except BuildError as error:
        if mode == "1" and not _COMPILES_NOTHING & set(sys.argv):
            raise SystemExit(f"error: QUAROT_CUDA=1, but {error}") from None
        return [], str(error)
    return [Extension(MODULE, sources=[])], ""


def _write_build_info(path: Path, **facts: Any) -> None:
    lines = ['"""What the build of this copy of quarot did; written by setup.py."""', ""]
    lines += [f"{name} = {value!r}" for name, value in facts.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _facts(toolkit: Toolkit | None = None, chosen: Selection | None = None, reason: str = "") -> dict[str, Any]:
    built = toolkit is not None and not reason
    return {
        "cuda": built,
        "reason": reason,
        "nvcc": toolkit.text if toolkit else "",
        "architectures": list(chosen.cubins) if built and chosen else [],
        "ptx_architectures": list(chosen.ptx) if built and chosen else [],
    }


class BuildPy(build_py):
    """Copies the package; where no extension is to be built, says why, loudly and in ``_build_info.py``."""

    def run(self) -> None:
        super().run()
        if self.distribution.ext_modules:
            return
        _, reason = plan()
        folder = ROOT / "quarot" if self.editable_mode else Path(self.build_lib) / "quarot"
        for stale in folder.glob("_C.*.so"):
            stale.unlink()
        _write_build_info(folder / "_build_info.py", **_facts(reason=reason))
        _say(reason)


class BuildExt(build_ext):
    """Compiles ``csrc`` through ninja; objects stay in ``build/cuda``, shared by every Python and later build."""

    def run(self) -> None:
        in_place = self.inplace or getattr(self, "editable_mode", False)
        target = Path(self.get_ext_filename(MODULE))
        output = target if in_place else Path(self.build_lib) / target
        (ROOT / output).parent.mkdir(parents=True, exist_ok=True)
        info = ROOT / output.parent / "_build_info.py"
        toolkit = find_toolkit()
        try:
            chosen = selection()
            compile_extension(ROOT, toolkit, chosen, str(output))
        except BuildError as error:
            if _mode() == "1":
                raise SystemExit(f"error: QUAROT_CUDA=1, but {error}") from None
            (ROOT / output).unlink(missing_ok=True)
            _write_build_info(info, **_facts(toolkit, reason=str(error)))
            _say(str(error))
            return
        _write_build_info(info, **_facts(toolkit, chosen))

    def get_outputs(self) -> list[str]:
        target = Path(self.build_lib) / self.get_ext_filename(MODULE)
        return [str(target)] if target.exists() else []
