"""One progress bar for every long step; ``progress=False`` or ``QUAROT_PROGRESS=0`` silences it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def progress_bar(items: Iterable[T], description: str, show: bool = True, total: int | None = None) -> Iterator[T]:
    """Iterate over ``items`` with a tqdm bar named ``description``, on stderr."""
    from tqdm import tqdm

    silent = not show or os.environ.get("QUAROT_PROGRESS", "1") == "0"
    yield from tqdm(items, desc=description, total=total, disable=silent, dynamic_ncols=True)
