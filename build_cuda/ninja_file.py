"""Writes the build.ninja of the extension: one object a source, depfiles, and one link per Python."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .architectures import Selection, gencode
from .toolkit import Toolkit

COMMON_FLAGS = "-O3 -std=c++17 -DNDEBUG --expt-relaxed-constexpr -Xcompiler -fPIC -Xcompiler -fvisibility=hidden"


@dataclass(frozen=True)
class Layout:
    """Where things are, relative to the repository root, in which ninja runs.

    CUDA objects depend on the architectures only and are shared by all Pythons; bindings and the link depend on Python.
    """

    root: Path
    chosen: Selection
    python_tag: str = f"cp{sys.version_info.major}{sys.version_info.minor}"
    python_include: str = sysconfig.get_paths()["include"]

    @property
    def build(self) -> PurePosixPath:
        return PurePosixPath("build/cuda")

    @property
    def objects(self) -> PurePosixPath:
        return self.build / self.chosen.tag

    @property
    def bindings(self) -> PurePosixPath:
        return self.build / f"{self.chosen.tag}-{self.python_tag}"

    @property
    def manifest(self) -> PurePosixPath:
        return self.build / f"{self.chosen.tag}-{self.python_tag}.ninja"

    def sources(self, pattern: str) -> list[PurePosixPath]:
        """Sources under csrc, sorted, relative to the root."""
        return sorted(PurePosixPath(p.relative_to(self.root).as_posix()) for p in (self.root / "csrc").rglob(pattern))


def _escape(text: str) -> str:
    return text.replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _object(folder: PurePosixPath, source: PurePosixPath) -> PurePosixPath:
    return folder / source.relative_to("csrc").with_suffix(source.suffix + ".o")


def pybind_include() -> str:
    """Headers of pybind11; imported here, so that objects alone build without it."""
    import pybind11

    return pybind11.get_include()


def render(layout: Layout, toolkit: Toolkit, *, strict: bool, output: str | None) -> str:
    """The text of build.ninja; ``output`` is the extension module to link, None for the CUDA objects alone."""
    check = f'"$$QUAROT_BUILD_PYTHON" build_cuda/checked_nvcc.py{" --strict" if strict else ""}'
    includes = f'-Icsrc -isystem "{toolkit.cutlass}"'
    # Lists are calls of a macro, not commas: nvcc takes a comma in -D for the start of the next definition.
    lists = {
        "QUAROT_ARCHITECTURES": [f"ITEM({arch})" for arch in layout.chosen.cubins],
        "QUAROT_PTX_ARCHITECTURES": [f"ITEM({arch})" for arch in layout.chosen.ptx],
        "QUAROT_CONCEPTS": [f"BIND({p.stem})" for p in layout.sources("*.cpp") if p.stem != "module"],
    }
    defines = " ".join(f"'-D{name}={' '.join(items)}'" for name, items in lists.items())
    lines = [
        "ninja_required_version = 1.5",
        f"builddir = {_escape(str(layout.build))}",
        "rule cuda",
        f'  command = {check} $in $out "{toolkit.nvcc}" {COMMON_FLAGS} {includes} -Xptxas -v $gencode '
        "-MD -MF $out.d -MT $out -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = nvcc $in",
    ]
    objects = []
    for source in layout.sources("*.cu"):
        target = _object(layout.objects, source)
        objects.append(str(target))
        lines += [f"build {_escape(str(target))}: cuda {_escape(str(source))}"]
        lines += [f"  gencode = {' '.join(gencode(source, layout.chosen))}"]
    if output is None:
        return "\n".join([*lines, f"default {' '.join(map(_escape, objects))}", ""])
    lines += [
        "rule binding",
        f'  command = "{toolkit.nvcc}" {COMMON_FLAGS} {includes} $defines -isystem "{pybind_include()}" '
        f'-isystem "{layout.python_include}" -MD -MF $out.d -MT $out -c $in -o $out',
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = bind $in",
        "rule link",
        f'  command = "{toolkit.nvcc}" -shared -cudart static -Xlinker --exclude-libs,ALL -Xlinker -s $in -o $out',
        "  description = link $out",
    ]
    for source in layout.sources("*.cpp"):
        target = _object(layout.bindings, source)
        objects.append(str(target))
        lines += [f"build {_escape(str(target))}: binding {_escape(str(source))}"]
        if source.stem == "module":  # the one file that depends on the set of concepts and of architectures
            lines += [f"  defines = {defines}"]
    lines += [f"build {_escape(output)}: link {' '.join(map(_escape, objects))}", f"default {_escape(output)}", ""]
    return "\n".join(lines)
