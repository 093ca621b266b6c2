"""Which GPU architectures each kernel file is compiled for: the folder decides.

| folder          | default                                | narrowed by the user                                    |
|-----------------|----------------------------------------|---------------------------------------------------------|
| ``*/sm90/``     | sm_90a                                 | always sm_90a: its instructions exist nowhere else      |
| ``*/sm80/``     | sm_80, sm_86, sm_89 and PTX compute_80 | those of the user's list below 90, else the first of it |
| everything else | sm_80, sm_86, sm_89, sm_90a, PTX of 90 | the user's list                                         |

The user's list is ``QUAROT_CUDA_ARCHS`` ("80;90a", "80 86+PTX", "8.0,9.0a") or else ``TORCH_CUDA_ARCH_LIST``.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from .toolkit import BuildError

MINIMUM = 80


@dataclass(frozen=True)
class Selection:
    """Compute capabilities times ten, ascending.

    Attributes:
        cubins: architectures that get machine code.
        ptx: architectures that get PTX, which the driver compiles for newer GPUs.
        narrowed: whether the user chose them.
    """

    cubins: tuple[int, ...] = (80, 86, 89, 90)
    ptx: tuple[int, ...] = (90,)
    narrowed: bool = False

    @property
    def tag(self) -> str:
        """Names the object folder: objects of two selections never mix."""
        return "_".join([*(str(a) for a in self.cubins), *(f"ptx{a}" for a in self.ptx)])


def parse(text: str) -> Selection:
    """Read a list such as ``"80;86;90a"``, ``"8.0 9.0a+PTX"``.

    Raises:
        BuildError: an entry that is no architecture, or one below compute capability 8.0.
    """
    cubins: set[int] = set()
    ptx: set[int] = set()
    for entry in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(?:sm_|compute_)?(?:(\d+)\.(\d)|(\d+))[af]?(\+PTX)?", entry, re.IGNORECASE)
        if match is None:
            raise BuildError(f"{entry!r} in {text!r} is not a GPU architecture; write for example 80;86;90a+PTX")
        arch = 10 * int(match[1]) + int(match[2]) if match[1] else int(match[3])
        if arch < MINIMUM:
            raise BuildError(f"compute capability {arch / 10} is not supported; 8.0 (A100) is the oldest")
        cubins.add(arch)
        if match[4]:
            ptx.add(arch)
    return Selection(tuple(sorted(cubins)), tuple(sorted(ptx)), narrowed=True)


def selection() -> Selection:
    """The user's selection, or the default."""
    for variable in ("QUAROT_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"):
        text = os.environ.get(variable, "").strip()
        if text:
            try:
                return parse(text)
            except BuildError as error:
                if variable == "QUAROT_CUDA_ARCHS":
                    raise
                # TORCH_CUDA_ARCH_LIST is set for other packages too: keep what we can serve.
                kept = [e for e in re.split(r"[;,\s]+", text) if re.match(r"([89]|1\d)\.", e)]
                if not kept:
                    raise BuildError(f"TORCH_CUDA_ARCH_LIST: {error}") from None
                return parse(" ".join(kept))
    return Selection()


def _cubin(arch: int) -> str:
    # The "a" opens Hopper's own instructions; such code runs on Hopper alone, which is what a cubin does anyway.
    name = f"{arch}a" if arch == 90 else str(arch)
    return f"-gencode=arch=compute_{name},code=sm_{name}"


def _ptx(arch: int) -> str:
    return f"-gencode=arch=compute_{arch},code=compute_{arch}"


def gencode(source: PurePosixPath, chosen: Selection) -> list[str]:
    """nvcc's ``-gencode`` flags for one ``.cu`` file, by the folder it lies in."""
    if "sm90" in source.parts:
        return [_cubin(90)]
    if "sm80" in source.parts:
        if not chosen.narrowed:
            return [_cubin(80), _cubin(86), _cubin(89), _ptx(80)]
        older = [a for a in chosen.cubins if a < 90]
        if older:
            return [_cubin(a) for a in older] + [_ptx(a) for a in chosen.ptx[:1]]
        # Nothing older was asked for: the file still has to link, and mma.sync code runs on newer GPUs as well.
        first = chosen.cubins[0]
        return [f"-gencode=arch=compute_{first},code=sm_{first}"]
    return [_cubin(a) for a in chosen.cubins] + [_ptx(a) for a in chosen.ptx]
