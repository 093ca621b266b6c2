// The choice of kernel by size. Every number was measured on an H200 (NOTES.md, "Dispatch") unless it says otherwise.
#include "gemm/dispatch.h"

namespace quarot {
namespace {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

GemmChoice skinny_choice(GemmSize const& s) {
    if (s.m <= 8) {
        // Long K: 32 warps have more of it in flight. Short K: 16 of them, once an SM. Twice would be 3-4 % faster alone,
        // but takes all registers, so that no kernel behind it can start early: 2 us more in a layer of a decode step.
        return {GemmKernel::kSkinny, 8, s.k > 4096 ? 32 : 16, 1};
    }
    if (s.m <= 16) return {GemmKernel::kSkinny, 16, 16, 1};
    // The activations of 32 tokens and 16 warps take 139 KB of shared memory, which sm_86 and sm_89 do not have.
    bool const small_shared = s.capability == 86 || s.capability == 89;
    return {GemmKernel::kSkinny, 32, small_shared ? 8 : 16, 1};
}

/// A Hopper tile and what it costs, in microseconds: `fixed` + for each wave of blocks `wave` + `wave_depth` * (K of a
/// block / 4096); `half` and `half_depth` for a last wave with one block an SM where two fit; `meeting` where blocks
/// share a tile. Least squares over `python -m benchmarks.gemm_candidates` (NOTES.md, "Dispatch"), but for int8 weights and
/// more than 256 tokens, which are fitted by hand.
struct WideTile {
    int weight_bits;
    int channels, tokens;
    int resident;  ///< blocks an SM holds
    bool stream_k;
    int most_parts;   ///< of K
    int most_tokens;  ///< M up to which it was measured
    double fixed, wave, wave_depth, half = 0.0, half_depth = 0.0, meeting = 0.0;
    int least_tokens = 0;  ///< and from which on
};

constexpr int kAny = 4096;  // above, the largest tile: fewest reads of the operands
constexpr WideTile kWideTiles[] = {
    {4, 128, 128, 1, false, 1, kAny, 1.31, 1.20, 10.66},
    {4, 128, 256, 1, false, 1, kAny, 0.00, 3.27, 21.24},
    {4, 128, 128, 1, true, 1, 512, 12.18, 0.69, 10.17},
    {4, 64, 64, 2, false, 4, 256, 0.00, 2.79, 7.92, 2.76, 5.04, 3.32},
    {4, 128, 64, 2, false, 4, 1024, 0.00, 4.04, 12.51, 3.32, 7.60, 3.83},
    {4, 128, 128, 1, false, 4, 256, 0.16, 3.45, 9.80, 0.00, 0.00, 4.85},
    {8, 64, 64, 2, false, 2, 256, 0.00, 2.58, 11.70, 2.11, 7.59, 4.09},
    {8, 128, 64, 2, false, 2, 64, 0.00, 2.68, 26.36, 2.71, 15.02, 3.59},
    {8, 128, 128, 1, false, 1, 256, 2.31, 2.65, 10.49, 0.00, 0.00, 0.00, 65},
    {8, 128, 128, 1, false, 1, kAny, 2.30, 0.00, 11.35, 0.00, 0.00, 0.00, 257},
    {8, 128, 256, 1, false, 1, kAny, 2.30, 0.00, 22.00, 0.00, 0.00, 0.00, 65},
};

constexpr double kNever = 1e30;

double predicted(GemmSize const& s, WideTile const& t, int parts) {
    int const blocks = ceil_div(s.n, t.channels) * ceil_div(s.m, t.tokens) * parts, slots = s.sm_count * t.resident;
    // Blocks that meet have to run at once to be worth it; Stream-K is for a few tiles too many.
    if (s.k % (32 * parts) != 0 || (parts > 1 && blocks > slots)) return kNever;
    if (t.stream_k && (blocks <= slots || 4 * blocks > 5 * slots)) return kNever;
    double const depth = double(s.k) / parts / 4096;
    int const rest = blocks % slots;
    bool const half = t.resident == 2 && rest > 0 && rest <= s.sm_count;
    double const waves = t.stream_k ? double(blocks) / slots : blocks / slots + (rest > 0 && !half);
    return t.fixed + waves * (t.wave + t.wave_depth * depth) + (half ? t.half + t.half_depth * depth : 0.0) +
           (parts > 1 ? t.meeting : 0.0);
}

GemmChoice wide_choice(GemmSize const& s) {
    GemmChoice best{GemmKernel::kWide, 128, 256};
    double least = kNever;
    for (WideTile const& t : kWideTiles) {
        if (s.m > t.most_tokens || s.m < t.least_tokens || s.int4_weight != (t.weight_bits == 4)) continue;
        for (int parts = 1; parts <= t.most_parts; ++parts) {
            double const us = predicted(s, t, parts);
            if (us >= least) continue;
            least = us;
            bool const split = t.most_parts > 1;
            best = {split ? GemmKernel::kSplit : GemmKernel::kWide, t.channels, t.tokens, split ? parts : t.stream_k};
        }
    }
    return best;
}

/// A tile of the Hopper kernel with group scales: microseconds of a wave of blocks, `last` those of a wave with one block
/// an SM where more fit, as in WideTile. Fitted by hand to the sizes in NOTES.md, "Group scales".
struct GroupTile {
    int channels, tokens;
    int resident;
    double wave, wave_depth, last, last_depth;
};

constexpr GroupTile kGroupTiles[] = {
    {128, 128, 1, 2.0, 17.2, 2.0, 17.2},
    {64, 128, 1, 1.9, 9.6, 1.9, 9.6},
    {64, 64, 2, 2.4, 10.7, 1.9, 6.6},
    {64, 32, 3, 2.3, 11.5, 1.4, 6.2},
};

GemmChoice groups_choice(GemmSize const& s) {
    GemmChoice best{GemmKernel::kWideGroups, 64, 32};
    if (s.m <= 32) return best;
    double least = kNever, depth = double(s.k) / 4096;
    for (GroupTile const& t : kGroupTiles) {
        int const blocks = ceil_div(s.n, t.channels) * ceil_div(s.m, t.tokens), slots = s.sm_count * t.resident;
        int const rest = blocks % slots;
        bool const alone = rest > 0 && rest <= s.sm_count;
        double const us = (blocks / slots + (rest > 0 && !alone)) * (t.wave + t.wave_depth * depth) +
                          alone * (t.last + t.last_depth * depth);
        if (us >= least) continue;
        least = us;
        best = {GemmKernel::kWideGroups, t.channels, t.tokens};
    }
    return best;
}

}  // namespace

GemmChoice choose_gemm(GemmSize const& s) {
    bool const tile_serves = s.int4_weight && s.m > 32 && s.group_size % 64 == 0;
    if (s.group_size > 0) {
        bool const hopper = s.int4_weight && s.group_size % 64 == 0 && s.capability == 90 && !s.float32_out;
        // Up to 8 tokens the few-token kernel is faster, but for layers wide enough for two blocks on every SM.
        if (hopper && s.vector_rows && (s.m > 8 || s.n > 128 * s.sm_count)) return groups_choice(s);
        return {tile_serves ? GemmKernel::kTile : GemmKernel::kGrouped};
    }
    if (s.packed_activations) {  // not measured, for want of such a GPU: the largest tile that fills it
        if (s.m <= 64) return {GemmKernel::kInt4Cores, 64, 128};
        bool const fills = ceil_div(s.m, 128) * ceil_div(s.n, 256) >= s.sm_count;
        return {GemmKernel::kInt4Cores, 128, fills ? 256 : 128};
    }
    // The CUTLASS kernels write 16-bit rows of 16-byte multiples.
    if (s.m <= 32) return skinny_choice(s);
    if (s.capability != 90 || s.float32_out || !s.vector_rows)
        return tile_serves ? GemmChoice{GemmKernel::kTile} : skinny_choice(s);
    return wide_choice(s);
}

}  // namespace quarot
