"""Which page holds which token: rows of ragged length over a shared pool of pages, growing or of fixed size.

Notation: B rows, T new tokens a row, P tokens a page, column = position in the (padded) batch as the model counts it.

Padding is never stored: a row holds its real tokens only, one after the other, so attention over a row needs its length
and nothing else. ``valid`` remembers which columns were real, for :meth:`crop`.

Every layer of a model stores the same tokens, so all of them share one table; only the pools differ.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """Where the new tokens of one forward go, the same for every layer.

    Attributes:
        slots: int64 [B * T], page * P + offset of every new token, -1 for padding.
        lengths: int32 [B], tokens a row holds, the new ones included.
        before: int32 [B], tokens a row held before.
        table: int32 [B, pages], page ids; entries past a row's length are arbitrary.
        past: columns before this step; None where the host does not know (fixed size, one token or compiled).
        longest, shortest: upper and lower bound of ``before``, known on the host.
        pages: pages that every pool must have by now.
        copies: (source, target) int64 page ids to copy before writing (copy on write), or None.
        lookups: what the first layer looked up and the others use again; None where nothing is kept.
    """

    slots: Tensor
    lengths: Tensor
    before: Tensor
    table: Tensor
    past: int | None
    longest: int
    pages: int
    copies: tuple[Tensor, Tensor] | None
    shortest: int = 0
    lookups: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] | None = None

    def on(self, device: torch.device) -> Step:
        """The same step with its tensors on another layer's device."""
        if self.slots.device == device:
            return self
        copies = None if self.copies is None else (self.copies[0].to(device), self.copies[1].to(device))
        slots, lengths, before, table = (x.to(device) for x in (self.slots, self.lengths, self.before, self.table))
        return self._replace(slots=slots, lengths=lengths, before=before, table=table, copies=copies, lookups=None)


def slots_of(table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Slots int64 [B, T] of token ``positions`` int64 [B, T] of each row; positions must lie inside the table."""
    page = table.gather(1, positions // page_size)
    return page.to(torch.int64) * page_size + positions % page_size


def new_positions(before: Tensor, count: int, valid: Tensor | None) -> Tensor:
    """Position in its row of each new token, int64 [B, T]; padding gets that of the last real token before it."""
    if valid is None:
        return before[:, None].to(torch.int64) + torch.arange(count, device=before.device)
    return before[:, None].to(torch.int64) + valid.to(torch.int64).cumsum(1) - 1


class GrowingTable:
    """Rows that grow page by page. Pages are shared between rows (beams, repeated prompts) and copied on write.

    Args:
        page_size: tokens a page.
        reserve: tokens a row is expected to reach; pools are allocated for that many at once.

    Attributes:
        repeats: the first tokens come in groups of this many equal rows (beams, several answers to one prompt), which
            are stored once. Taken at its word, and for one prompt only.
    """

    def __init__(self, page_size: int, reserve: int = 0) -> None:
        self.page_size, self.reserve = page_size, reserve
        self.num_pages = 0
        self.references: list[int] = []
        self.free: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forget every row; the pages stay allocated."""
        self.repeats = 1
        self.references = [0] * self.num_pages
        self.free = list(range(self.num_pages - 1, -1, -1))
        self.rows: list[list[int]] = []
        self.counts: list[int] = []
        self.columns = 0
        self.valid: Tensor | None = None
        self.lengths: Tensor | None = None
        self._table: Tensor | None = None
        self._undo: tuple[list[int], list[tuple[int, int, int]], int, Tensor | None, int] | None = None

    @property
    def batch(self) -> int:
        return len(self.rows)

    def get_seq_length(self) -> int:
        return self.columns

    def append(self, batch: int, count: int, valid: Tensor | None, device: torch.device) -> Step:
        """Make room for ``count`` columns; ``valid`` bool [B, T] marks the real tokens, None when all are.

        Raises:
            ValueError: the batch differs from the one the rows were made for.
        """
        if not self.rows:
            self.rows, self.counts = [[] for _ in range(batch)], [0] * batch
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        elif batch != len(self.rows):
            raise _another_batch(len(self.rows), batch)
        assert self.lengths is not None
        if valid is not None and bool(valid.all()):
            valid = None
        shared = self.repeats if self.columns == 0 and batch % self.repeats == 0 else 1
        self.repeats = 1
        added = [count] * batch if valid is None else valid.sum(1).tolist()
        before, old_counts, past, old_valid, old_pages = (
            self.lengths,
            self.counts,
            self.columns,
            self.valid,
            self.num_pages,
        )
        copied = self._make_room([more * (row % shared == 0) for row, more in enumerate(added)])
        if shared > 1:
            self._share(shared)
        self._undo = (old_counts, copied, past, old_valid, old_pages)
        self.counts = [a + b for a, b in zip(old_counts, added, strict=True)]
        self._remember_columns(batch, count, valid, device)
        self.lengths = before + (count if valid is None else valid.sum(1).to(torch.int32))
        positions = new_positions(before, count, valid).clamp_(min=0)
        table = self.table(device)
        slots = slots_of(table, positions, self.page_size)
        if valid is not None:
            slots = slots.masked_fill(~valid, -1)
        if shared > 1:
            repeated = torch.arange(batch, device=device) % shared > 0
            slots = slots.masked_fill(repeated[:, None], -1)
        copies = None
        if copied:
            pairs = torch.tensor([(old, self.rows[row][place]) for row, place, old in copied]).to(device)
            copies = (pairs[:, 0], pairs[:, 1])
        longest, shortest = max(old_counts, default=0), min(old_counts, default=0)
        where = (slots.reshape(-1), self.lengths, before, table)
        return Step(*where, past, longest, self.num_pages, copies, shortest, lookups={})

    def table(self, device: torch.device) -> Tensor:
        """Page ids int32 [B, pages]."""
        if self._table is None or self._table.device != device:
            width = max((len(row) for row in self.rows), default=0)
            padded = [row + [0] * (max(width, 1) - len(row)) for row in self.rows]
            self._table = torch.tensor(padded, dtype=torch.int32).to(device)
        return self._table

    def settle(self) -> None:
        """The last :meth:`append` is final: the forward it belongs to is over."""
        self._undo = None

    def undo(self) -> None:
        """Take back an :meth:`append` that is not final, after a failure in the middle of a forward."""
        if self._undo is None:
            return
        counts, copied, self.columns, self.valid, pages = self._undo
        for row, place, old in copied:
            self._release(self.rows[row][place])
            self.rows[row][place] = old
            self.references[old] += 1
        self._set_counts(counts)
        # Pages that were added may be what did not fit: ask for them again only when they are needed.
        self.free = [page for page in self.free if page < pages]
        self.references, self.num_pages = self.references[:pages], pages

    def crop(self, remove: int) -> None:
        """Drop the last ``remove`` columns of every row."""
        remove = min(remove, self.columns)
        if remove <= 0:
            return
        self.columns -= remove
        if self.valid is None:
            self._set_counts([max(count - remove, 0) for count in self.counts])
        else:
            self.valid = self.valid[:, : self.columns]
            self._set_counts(self.valid.sum(1).tolist())

    def select(self, rows: Tensor) -> None:
        """Rows in a new order, some perhaps dropped or repeated; repeated rows share their pages."""
        order = _known_rows(rows, len(self.rows))
        chosen = [list(self.rows[row]) for row in order]
        for row in chosen:
            for page in row:
                self.references[page] += 1
        for row in self.rows:
            for page in row:
                self._release(page)
        self.rows, self.counts = chosen, [self.counts[row] for row in order]
        if self.lengths is not None:
            self.lengths = self.lengths.index_select(0, rows.to(self.lengths.device))
        if self.valid is not None:
            self.valid = self.valid.index_select(0, rows.to(self.valid.device))
        self._table = self._undo = None

    def _set_counts(self, counts: list[int]) -> None:
        self.counts = counts
        for row, count in zip(self.rows, counts, strict=True):
            while len(row) > -(-count // self.page_size):
                self._release(row.pop())
        if self.lengths is not None:
            self.lengths = torch.tensor(counts, dtype=torch.int32).to(self.lengths.device)
        self._table = self._undo = None

    def _make_room(self, added: list[int]) -> list[tuple[int, int, int]]:
        """Give every row the pages it needs; returns (row, place, old page) of the shared pages it no longer shares."""
        copied = []
        self._reserve(added)
        for number, (row, count, more) in enumerate(zip(self.rows, self.counts, added, strict=True)):
            if self._writes_shared(row, count, more):
                copied.append((number, len(row) - 1, row[-1]))
                self._release(row[-1])
                row[-1] = self._take()
                self._table = None
            while len(row) < -(-(count + more) // self.page_size):
                row.append(self._take())
                self._table = None
        return copied

    def _writes_shared(self, row: list[int], count: int, more: int) -> bool:
        """Whether ``more`` tokens behind ``count`` begin in a page that other rows read, too."""
        return bool(more) and count % self.page_size > 0 and self.references[row[-1]] > 1

    def _share(self, group: int) -> None:
        """Let every row read the pages of the first row of its group."""
        for number in range(len(self.rows)):
            self.rows[number] = list(self.rows[number - number % group])
            if number % group:
                for page in self.rows[number]:
                    self.references[page] += 1

    def _reserve(self, added: list[int]) -> None:
        """Raise ``num_pages`` so that the coming :meth:`_take` calls succeed; by half at least, so growth is rare."""
        need = 0
        for row, count, more in zip(self.rows, self.counts, added, strict=True):
            need += -(-(count + more) // self.page_size) - len(row) + self._writes_shared(row, count, more)
        if need <= len(self.free):
            return
        hint = len(self.rows) * -(-self.reserve // self.page_size)
        target = max(self.num_pages + need - len(self.free), self.num_pages * 3 // 2, hint)
        self.free[:0] = range(target - 1, self.num_pages - 1, -1)
        self.references += [0] * (target - self.num_pages)
        self.num_pages = target

    def _take(self) -> int:
        page = self.free.pop()
        self.references[page] = 1
        return page

    def _release(self, page: int) -> None:
        self.references[page] -= 1
        if not self.references[page]:
            self.free.append(page)

    def _remember_columns(self, batch: int, count: int, valid: Tensor | None, device: torch.device) -> None:
        if valid is not None or self.valid is not None:
            old = self.valid
            if old is None:
                old = torch.ones(batch, self.columns, dtype=torch.bool, device=device)
            new = torch.ones(batch, count, dtype=torch.bool, device=device) if valid is None else valid
            self.valid = torch.cat([old, new.to(old.device)], dim=1)
        self.columns += count


def _known_rows(rows: Tensor, held: int) -> list[int]:
    """The numbers in ``rows``; raises ValueError for one that is none of the ``held`` rows."""
    numbers: list[int] = rows.tolist()
    wrong = next((row for row in numbers if type(row) is not int or not 0 <= row < held), None)
    if wrong is not None:
        raise ValueError(f"QuantKVCache holds {held} rows, and row {wrong} was asked for")
    return numbers


def _another_batch(held: int, batch: int) -> ValueError:
    return ValueError(
        f"QuantKVCache holds {held} rows and got a batch of {batch}; call reset(), "
        "batch_select_indices() or batch_repeat_interleave() first, or use a new cache"
    )


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class StaticTable:
    """Rows of fixed capacity, every tensor allocated once: for CUDA graphs and ``torch.compile``; nothing syncs.

    Row b owns pages ``b * pages_per_row ..`` for good. A token beyond the capacity is refused with the numbers wherever
    the host is told of it; a replayed graph, of which it is not, drops it (slot -1).
    """

    def __init__(self, page_size: int, max_batch: int, max_length: int) -> None:
        self.page_size, self.max_batch, self.max_length = page_size, max_batch, max_length
        self.pages_per_row = -(-max_length // page_size)
        self.num_pages = max_batch * self.pages_per_row
        self.batch = 0
        self.counted = 0  # columns the host knows of: a lower bound, since replayed graphs append without it
        self.pages = torch.arange(self.num_pages, dtype=torch.int32).view(max_batch, -1)
        self.lengths = torch.zeros(max_batch, dtype=torch.int32)
        self.before = torch.zeros(max_batch, dtype=torch.int32)
        self.columns = torch.zeros((), dtype=torch.int64)
        self.valid = torch.zeros(max_batch, max_length, dtype=torch.bool)
        self.slots = torch.full((max_batch * max_length,), -1, dtype=torch.int64)

    def tensors(self) -> tuple[str, ...]:
        return "pages", "lengths", "before", "columns", "valid", "slots"

    def start(self, device: torch.device) -> None:
        """Move to the device and pin the addresses."""
        for name in self.tensors():
            tensor = getattr(self, name).to(device)
            setattr(self, name, tensor)
            torch._dynamo.mark_static_address(tensor)

    def reset(self) -> None:
        self.batch = self.counted = 0
        for name in ("lengths", "before", "columns", "valid"):
            getattr(self, name).zero_()

    def get_seq_length(self) -> Tensor:
        return self.columns

    def settle(self) -> None:
        """See :meth:`undo`."""

    def undo(self) -> None:
        """Nothing to take back on the host; call ``reset()`` or ``crop()``."""

    def append(self, batch: int, count: int, valid: Tensor | None, device: torch.device) -> Step:
        """As :meth:`GrowingTable.append`, on the device.

        Raises:
            ValueError: the batch, or the length as far as the host knows it, does not fit; or, unless compiled or
                captured, the batch differs from that of the rows held.
        """
        eager = not torch.compiler.is_compiling() and not _capturing(device)
        past, shortest = None, 0
        if eager and count > 1:
            past, shortest = torch.stack((self.columns, self.lengths[:batch].min().long())).tolist()
        before_host = self.counted if past is None else past
        if batch > self.max_batch or count + before_host > self.max_length:
            raise ValueError(
                f"QuantKVCache is fixed to {self.max_batch} rows of {self.max_length} tokens and got {batch} rows of "
                f"{count} tokens after {before_host}; raise max_batch and max_length, or leave both out to let it grow"
            )
        if eager and self.counted and batch != self.batch:
            raise _another_batch(self.batch, batch)
        if eager:
            self.batch, self.counted = batch, before_host + count
        new = torch.ones(batch, count, dtype=torch.bool, device=device) if valid is None else valid
        lengths, before = self.lengths[:batch], self.before[:batch]
        before.copy_(lengths)
        where = (self.columns + torch.arange(count, device=device)).clamp(max=self.max_length - 1)
        self.valid[:batch].index_copy_(1, where, new)
        positions = new_positions(before, count, new).clamp(min=0)
        kept = new & (positions < self.max_length)
        slots = slots_of(self.pages[:batch], positions.clamp(max=self.max_length - 1), self.page_size)
        view = self.slots[: batch * count]
        view.copy_(torch.where(kept, slots, -1).view(-1))
        lengths.copy_((before + new.sum(1).to(torch.int32)).clamp(max=self.max_length))
        self.columns.add_(count)
        step = self.current(batch, count)
        return step if past is None else step._replace(past=past, longest=past, shortest=shortest, lookups={})

    def current(self, batch: int, count: int) -> Step:
        """The step that :meth:`append` laid out, as far as it is known without asking the device."""
        fixed = (self.lengths[:batch], self.before[:batch], self.pages[:batch])
        return Step(self.slots[: batch * count], *fixed, None, self.max_length, self.num_pages, None)

    def crop(self, remove: int) -> None:
        """Drop the last ``remove`` columns of every row."""
        self.columns.sub_(remove).clamp_(min=0)
        self.counted = max(self.counted - remove, 0)
        column = torch.arange(self.max_length, device=self.valid.device)
        self.valid &= column < self.columns
        self.lengths.copy_(self.valid.sum(1))

    def select(self, rows: Tensor) -> Tensor:
        """Reorder rows; returns the page ids to gather every pool by, int64 [num_pages]."""
        order = torch.arange(self.max_batch, device=self.lengths.device)
        if len(rows) > self.max_batch:
            raise ValueError(f"QuantKVCache is fixed to {self.max_batch} rows; {len(rows)} were asked for")
        if not torch.compiler.is_compiling() and not _capturing(rows.device):
            _known_rows(rows, self.batch or self.max_batch)
        order[: len(rows)] = rows.to(order.device)
        for name in ("lengths", "valid"):
            tensor = getattr(self, name)
            tensor.copy_(tensor.index_select(0, order))
        self.batch = len(rows)
        return self.pages.index_select(0, order).view(-1).to(torch.int64)
