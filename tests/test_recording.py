"""Recording CUDA graphs (here without a GPU: what surrounds it)."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch

from quarot.recording import recording


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_the_collector_waits(enabled: bool, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection during a recording may free another graph, which ends the recording with an error."""
    seen: dict[str, Any] = {}

    @contextlib.contextmanager
    def graph(*args: Any, **settings: Any) -> Any:
        seen.update(settings, collecting=gc.isenabled())
        yield
        seen["collecting at the end"] = gc.isenabled()

    monkeypatch.setattr(torch.cuda, "graph", graph)
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with contextlib.suppress(RuntimeError), recording(None):  # type: ignore[arg-type]
            if fails:
                raise RuntimeError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen["collecting"] is False
    assert fails or seen["collecting at the end"] is False
    assert seen["capture_error_mode"] == "thread_local"
