"""The plain Hadamard transform of hidden and intermediate widths against a copy and against fp16 matmuls.

Where the package ``fast_hadamard_transform`` is installed, it is a peer too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.activations import keeping, row_per_peer, spec_of, tokens, torch_hadamard
from benchmarks.report import Row
from benchmarks.shapes import Options
from benchmarks.timing import Call
from quarot.ops import fast_hadamard
from quarot.ops.hadamard import hadamard, hadamard_reference


def rows(options: Options) -> Iterator[Row]:
    """One row a width, M and peer."""
    done = set()
    for shape in options.shapes():
        for layer, width in (("hidden", shape.hidden), ("down_proj", shape.intermediate)):
            if width in done:
                continue
            done.add(width)
            spec, unfused = spec_of(width), torch_hadamard(spec_of(width))
            x = torch.randn(64, width, device="cuda", dtype=torch.float16)
            exact = hadamard_reference(x.double(), spec.order, spec.pow2, 1)
            error = (hadamard(x, spec.order, spec.pow2, 1).double() - exact).norm() / exact.norm()
            if error > 5e-4:
                raise AssertionError(f"hadamard of {width} is off by {error:.1e}")
            for m in tokens(options):

                def calling(function: Callable[[torch.Tensor], torch.Tensor], m: int = m, width: int = width) -> Call:
                    x = torch.randn(m, width, device="cuda", dtype=torch.float16)
                    return keeping(lambda: function(x))

                make = partial(calling, lambda x, spec=spec: hadamard(x, spec.order, spec.pow2, 1))
                others = {}
                if fast_hadamard.package() is not None and fast_hadamard.serves(spec.order, spec.pow2, 1):
                    package = partial(fast_hadamard.transform, order=spec.order, pow2=spec.pow2)
                    others[fast_hadamard.NAME] = partial(calling, package)
                yield from row_per_peer("hadamard", shape.model, layer, m, width, 4 * m * width, make,
                                        partial(calling, unfused), others)  # fmt: skip
