"""First rows of Williamson's four symmetric circulant blocks for the two useful orders that Paley does not give.

The data are those of Sloane's library of Hadamard matrices (had.172.will, had.156.will). Order 172 is what makes
11008 = 172 * 64 (Llama-2-7B) half the work of the smallest Paley factorisation, 344 * 32.
"""

from __future__ import annotations

FIRST_ROWS: dict[int, tuple[str, str, str, str]] = {
    156: (
        "+++--+-+-----+--++----++--+-----+-+--++",
        "++++---+--++----+-+--+-+----++--+---+++",
        "+++--++-+---+-+--+----+--+-+---+-++--++",
        "+---++-+-+-----+++-++-+++-----+-+-++---",
    ),
    172: (
        "+---++--++++-+-+++-++--++-+++-+-++++--++---",
        "++-++++++----+-+--++-++-++--+-+----++++++-+",
        "+++-+-++--+-+-++++-+----+-++++-+-+--++-+-++",
        "++---++++-+--+--++--------++--+--+-++++---+",
    ),
}
