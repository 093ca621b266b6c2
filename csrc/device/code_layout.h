// How the codes of a row lie in memory.
#pragma once

namespace quarot {

enum class CodeLayout : int {
    kBytes,        // int8 each
    kNibbles,      // two a byte, the even column in the low half; at most 4 bits
    kUpperHalves,  // int8 of 16 times the code each, and a sixteenth of the scale; at most 4 bits
};

inline bool layout_fits(CodeLayout layout, int bits) { return bits >= 2 && bits <= (layout == CodeLayout::kBytes ? 8 : 4); }

}  // namespace quarot
