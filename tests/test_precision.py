"""Products that need all of float32 get it, whatever the user says about TF32 and by whichever name."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quarot.calibration.activation_clip import search_activation_clip
from quarot.calibration.moments import Moments
from quarot.nn.quant_linear import QuantLinear
from quarot.ops.float32_matmul import float32_matmul, float32_matmul_reference
from quarot.ops.hadamard import hadamard, hadamard_reference
from quarot.ops.registry import reference_backend
from quarot.precision import tf32
from quarot.quantization.gptq import quantize_gptq

MATMUL = torch.backends.cuda.matmul
aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.addmm_.default, aten.bmm.default, aten.baddbmm.default}


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    before, MATMUL.allow_tf32 = MATMUL.allow_tf32, True
    yield
    MATMUL.allow_tf32 = before


class Watch(TorchDispatchMode):
    """Notes for every matrix product whether it may be rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            self.allowed.append(MATMUL.allow_tf32)
        return func(*args, **(kwargs or {}))


CALLS: dict[str, Callable[[], Any]] = {
    "hadamard": lambda: hadamard_reference(torch.randn(4, 48), 12, 4, 1),
    "float32_matmul": lambda: float32_matmul_reference(torch.randn(4, 3), torch.randn(3, 5)),
    "gptq": lambda: quantize_gptq(torch.randn(8, 64), torch.eye(64), 4, block_size=32),
    "moments": lambda: Moments().add(torch.randn(8, 4)),
    "clip": lambda: search_activation_clip(torch.randn(8, 32), torch.randn(4, 32), 4, None),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_product_is_rounded(tf32_allowed: None, name: str) -> None:
    with Watch() as watch:
        CALLS[name]()
    assert watch.allowed
    assert not any(watch.allowed)
    assert MATMUL.allow_tf32


def test_the_setting_comes_back_after_an_error(tf32_allowed: None) -> None:
    with pytest.raises(KeyError), tf32(False):
        raise KeyError
    assert MATMUL.allow_tf32


def test_blocks_of_threads_overlap(tf32_allowed: None) -> None:
    """One begins in the other and ends after it: the switch of the process must forbid as long as either does."""
    began, ended, found = threading.Event(), threading.Event(), []

    def other() -> None:
        with tf32(False):
            began.set()
            ended.wait()
            found.append(MATMUL.allow_tf32)

    thread = threading.Thread(target=other)
    with tf32(False):
        thread.start()
        began.wait()
    ended.set()
    thread.join()
    assert found == [False]
    assert MATMUL.allow_tf32


def test_the_setting_survives_threads_that_want_opposites(tf32_allowed: None) -> None:
    began, ended = threading.Event(), threading.Event()

    def other() -> None:
        with tf32(True):
            began.set()
            ended.wait()

    thread = threading.Thread(target=other)
    with tf32(False):
        thread.start()
        began.wait()
        allowed = MATMUL.allow_tf32
    ended.set()
    thread.join()
    assert not allowed  # rounding is permitted, never needed
    assert MATMUL.allow_tf32
    with tf32(False), tf32(True):
        assert MATMUL.allow_tf32
    assert MATMUL.allow_tf32


def test_many_threads_leave_the_setting_as_it_was(tf32_allowed: None) -> None:
    def often(number: int) -> bool:
        rounded = False
        for turn in range(200):
            with contextlib.suppress(KeyError), tf32(False):
                rounded |= MATMUL.allow_tf32
                if (turn + number) % 5 == 0:
                    raise KeyError
        return rounded

    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(often, range(8)))
    assert MATMUL.allow_tf32


@pytest.mark.parametrize("said", ["highest", "high", "medium"])
def test_what_was_said_for_all_products_comes_back(said: str) -> None:
    """By way of ``allow_tf32``, "medium" left PyTorch in a state that it refuses to report."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(said)
    try:
        with tf32(False):
            assert not MATMUL.allow_tf32
            with tf32(True):
                assert MATMUL.allow_tf32
        assert torch.get_float32_matmul_precision() == said
        assert MATMUL.allow_tf32 == (said != "highest")
    finally:
        torch.set_float32_matmul_precision(before)


def test_what_is_said_inside_a_block_stays(tf32_allowed: None) -> None:
    with tf32(True):
        MATMUL.allow_tf32 = False
    assert MATMUL.allow_tf32 is False


def test_a_block_counts_whatever_was_said_since_the_one_around_it_began(tf32_allowed: None) -> None:
    with tf32(False):
        MATMUL.allow_tf32 = True
        with tf32(False):
            assert not MATMUL.allow_tf32


@pytest.mark.skipif(not hasattr(MATMUL, "fp32_precision"), reason="torch before 2.9 has one name only")
def test_the_newer_name_is_understood() -> None:
    before = MATMUL.fp32_precision
    MATMUL.fp32_precision = "tf32"
    try:
        with tf32(False):
            assert MATMUL.fp32_precision == "ieee"
            assert not MATMUL.allow_tf32
        assert MATMUL.fp32_precision == "tf32"
    finally:
        MATMUL.fp32_precision = before


def test_the_op_is_a_product_that_compiles() -> None:
    a, b = torch.randn(4, 3), torch.randn(3, 5)
    torch.library.opcheck(torch.ops.quarot.float32_matmul.default, (a, b))
    compiled = torch.compile(lambda x, y: float32_matmul(x, y) + 1, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(a, b), a @ b + 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_results_on_a_gpu_do_not_depend_on_the_setting(tf32_allowed: None) -> None:
    x = torch.randn(64, 768, device="cuda")
    with reference_backend():
        exact = hadamard(x.double(), 12, 64, 1)
        torch.testing.assert_close(hadamard(x, 12, 64, 1).double(), exact, rtol=1e-5, atol=1e-5)
    layer = QuantLinear(768, 256, w_symmetric=False, w_group_size=32, a_bits=8, device="cuda", dtype=torch.float32)
    for name, high in (("qweight", 256), ("weight_scale", 1), ("weight_zero", 8)):
        tensor = getattr(layer, name)
        tensor.copy_(torch.randint(0, high, tensor.shape) if high > 1 else torch.rand(tensor.shape))
    with torch.no_grad():
        rounded = layer(x)
        MATMUL.allow_tf32 = False
        assert torch.equal(rounded, layer(x))
