"""The package ``fast_hadamard_transform`` as a backend: a stand-in with its signature, as the package needs a GPU."""

import types

import pytest
import torch

from quarot.ops import fast_hadamard
from quarot.ops.hadamard import hadamard_reference
from quarot.precision import tf32
from quarot.rotation.hadamard import hadamard_matrix


def sylvester(x, scale=1.0):
    """What the package computes: the last dimension times H_n, times ``scale``, in the dtype of x."""
    return ((x.double() @ hadamard_matrix(x.shape[-1]).double()) * scale).to(x.dtype)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setitem(
        __import__("sys").modules, fast_hadamard.NAME, types.SimpleNamespace(hadamard_transform=sylvester)
    )
    fast_hadamard.package.cache_clear()
    fast_hadamard.selected.cache_clear()
    yield monkeypatch
    fast_hadamard.package.cache_clear()
    fast_hadamard.selected.cache_clear()


@pytest.mark.parametrize(("order", "pow2"), [(1, 64), (1, 4096), (12, 16), (172, 64), (28, 512)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_it_computes_what_the_op_does(installed, order, pow2, dtype):
    assert fast_hadamard.serves(order, pow2, 1)
    wide = torch.randn(3, 5, 2 * order * pow2 + 7).to(dtype)
    x = wide[..., 3 : 3 + 2 * order * pow2]  # two blocks a row, strided
    got = fast_hadamard.transform(x, order, pow2)
    want = hadamard_reference(x.double(), order, pow2, 1)
    assert got.dtype == dtype
    assert got.shape == x.shape
    torch.testing.assert_close(got.double(), want, rtol=0, atol=8e-3 if dtype == torch.float16 else 1e-5)


def test_the_dense_factor_stays_in_float32_where_tf32_is_allowed(installed):
    allowed, matmul = [], torch.matmul

    def seen(*operands):
        allowed.append(torch.backends.cuda.matmul.allow_tf32)
        return matmul(*operands)

    installed.setattr(torch, "matmul", seen)
    with tf32(True):
        fast_hadamard.transform(torch.randn(2, 192), 12, 16)
    assert allowed == [False]


def test_what_it_does_not_serve_is_left_to_quarot(installed):
    assert not fast_hadamard.serves(1, 32, 128)  # across heads
    assert not fast_hadamard.serves(12, 4, 1)
    assert not fast_hadamard.serves(1, 65536, 1)


def test_selection(installed):
    assert not fast_hadamard.selected()
    fast_hadamard.selected.cache_clear()
    installed.setenv("QUAROT_HADAMARD", fast_hadamard.NAME)
    assert fast_hadamard.selected()


def test_selection_of_what_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(fast_hadamard, "package", lambda: None)
    fast_hadamard.selected.cache_clear()
    monkeypatch.setenv("QUAROT_HADAMARD", fast_hadamard.NAME)
    with pytest.raises(ImportError, match="unset the variable"):
        fast_hadamard.selected()
    monkeypatch.setenv("QUAROT_HADAMARD", "fht")
    with pytest.raises(ValueError, match="'fht' is not one of auto, fast_hadamard_transform"):
        fast_hadamard.selected()
