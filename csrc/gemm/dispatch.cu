// The choice of kernel by size. Every number was measured on an H200 (NOTES.md, "Dispatch") unless it says otherwise.
#include "gemm/dispatch.h"

#include "gemm/sm90/one_row.h"
#include "gemm/sm90/ring.h"

namespace quarot {
namespace {

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

GemmChoice skinny_choice(GemmSize const& s) {
    bool const one_row = s.m == 1 && s.int4_weight && s.capability == 90 && !s.float32_out && s.k <= sm90::kOneRowK;
    if (one_row) return {GemmKernel::kSkinny, 1, s.k > 4096 ? 32 : 16, 1};
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

/// A CUTLASS tile of int8 weights and what it costs, in microseconds: `fixed` + for each wave of blocks `wave` +
/// `wave_depth` * (K of a block / 4096); `half` and `half_depth` for a last wave with one block an SM where two fit;
/// `meeting` where blocks share a tile. Least squares over `python -m benchmarks.gemm_candidates` (NOTES.md, "Dispatch"), but
/// for more than 256 tokens, which are fitted by hand.
struct WideTile {
    int channels, tokens;
    int resident;                 ///< blocks an SM holds
    int least_parts, most_parts;  ///< of K
    int most_tokens;              ///< M up to which it was measured
    double fixed, wave, wave_depth, half = 0.0, half_depth = 0.0, meeting = 0.0;
    int least_tokens = 0;  ///< and from which on
};

constexpr int kAny = 4096;  // above, the largest tile: fewest reads of the operands
constexpr WideTile kWideTiles[] = {
    {64, 64, 2, 1, 2, 256, 0.00, 2.58, 11.70, 2.11, 7.59, 4.09},
    {128, 64, 2, 1, 2, 64, 0.00, 2.68, 26.36, 2.71, 15.02, 3.59},
    {128, 128, 1, 1, 1, 256, 2.31, 2.65, 10.49, 0.00, 0.00, 0.00, 65},
    {128, 128, 1, 1, 1, kAny, 2.30, 0.00, 11.35, 0.00, 0.00, 0.00, 257},
    {128, 256, 1, 1, 1, kAny, 2.30, 0.00, 22.00, 0.00, 0.00, 0.00, 65},
};

/// A tile of the ring kernel, in microseconds: `fixed` + for each wave of blocks `wave` + `wave_depth` * (K of a block /
/// 4096) + for each strip of 64 channels that the block with the most of them has in all `strip_depth` * (K / 4096). As
/// fitted above: up to 512 tokens all in turns, beyond each on its own at the power limit.
struct RingTile {
    int channels, tokens;
    int least_tokens, most_tokens;  ///< M
    double fixed, wave, wave_depth, strip_depth;
    int peers = 1;  ///< blocks that share the K of a tile; all of them have to run at once
};

constexpr RingTile kRingTiles[] = {
    {64, 32, 17, 32, 0.28, 1.09, 1.86, 1.86},    {128, 32, 17, 32, 0.00, 1.88, 1.39, 2.83},
    {192, 32, 17, 32, 0.00, 1.92, 1.07, 3.25},   {64, 32, 17, 32, 1.32, 1.32, 4.14, 0.00, 2},
    {192, 32, 17, 32, 2.80, 0.00, 1.26, 3.43, 2},
    {64, 64, 33, 1024, 1.27, 1.02, 3.57, 0.00},  {64, 64, 33, 1024, 2.04, 1.02, 4.42, 0.00, 2},
    {128, 64, 33, 1024, 1.60, 0.96, 2.44, 1.79}, {192, 64, 33, 1024, 1.71, 0.86, 2.45, 1.96},
    {320, 64, 33, 512, 2.17, 0.53, 2.88, 2.17},  {384, 64, 33, 512, 1.88, 0.80, 3.90, 2.07},
    {64, 128, 33, kAny, 1.49, 0.72, 5.55, 0.00},
    {128, 128, 33, 512, 1.57, 0.44, 0.98, 5.06}, {128, 128, 513, kAny, 0.00, 1.26, 2.47, 3.96},
    {192, 128, 33, 512, 1.78, 0.34, 1.15, 5.09}, {192, 128, 513, kAny, 0.00, 1.44, 0.83, 4.83},
    {128, 256, 33, 512, 0.39, 2.39, 2.86, 8.52}, {128, 256, 513, kAny, 1.03, 2.02, 1.09, 9.08},
};

constexpr double kNever = 1e30;

double predicted(GemmSize const& s, WideTile const& t, int parts) {
    int const blocks = ceil_div(s.n, t.channels) * ceil_div(s.m, t.tokens) * parts, slots = s.sm_count * t.resident;
    // Blocks that meet have to run at once to be worth it.
    if (s.k % (32 * parts) != 0 || (parts > 1 && blocks > slots)) return kNever;
    double const depth = double(s.k) / parts / 4096;
    int const rest = blocks % slots;
    bool const half = t.resident == 2 && rest > 0 && rest <= s.sm_count;
    int const waves = blocks / slots + (rest > 0 && !half);
    return t.fixed + waves * (t.wave + t.wave_depth * depth) + (half ? t.half + t.half_depth * depth : 0.0) +
           (parts > 1 ? t.meeting : 0.0);
}

double predicted(GemmSize const& s, RingTile const& t) {
    // The copy engine is slow at rows that do not exist: no more of them than half a tile where it makes a difference.
    bool const wasteful = t.tokens >= 128 && s.m <= 512 && (s.m - 1) % t.tokens < t.tokens / 2;
    if (s.m < t.least_tokens || s.m > t.most_tokens || wasteful) return kNever;
    sm90::RingGrid const grid = sm90::ring_grid(s.m, s.n, t.channels, t.tokens, s.sm_count / t.peers);
    int const blocks = t.peers * grid.channel_tiles * grid.token_tiles;
    if (t.peers > 1 && (blocks > s.sm_count || s.k < 128 * t.peers)) return kNever;
    int strips = 0;  // of the first block
    for (int tile = 0; tile < grid.channel_tiles * grid.token_tiles; tile += s.sm_count / t.peers)
        strips += grid.strips_of(grid.channel_tile_of(tile));
    double const depth = (grid.waves * t.wave_depth + strips * t.strip_depth) / t.peers;
    return t.fixed + grid.waves * t.wave + depth * s.k / 4096;
}

/// The few-token kernel for 17 to 32 tokens, likewise: for each strip of 16 channels that a block has.
double predicted_skinny(GemmSize const& s) {
    return 3.12 + 1.19 * ceil_div(ceil_div(s.n, 16), s.sm_count) * s.k / 4096;
}

GemmChoice wide_choice_int8(GemmSize const& s) {
    GemmChoice best{GemmKernel::kWide, 128, 256};
    double least = kNever;
    for (WideTile const& t : kWideTiles) {
        if (s.m > t.most_tokens || s.m < t.least_tokens) continue;
        for (int parts = t.least_parts; parts <= t.most_parts; ++parts) {
            double const us = predicted(s, t, parts);
            if (us >= least) continue;
            least = us;
            GemmKernel const kernel = t.most_parts > 1 ? GemmKernel::kSplit : GemmKernel::kWide;
            best = {kernel, t.channels, t.tokens, t.most_parts > 1 ? parts : 0};
        }
    }
    return best;
}

GemmChoice wide_choice_int4(GemmSize const& s) {
    bool const few = s.m <= 32;
    GemmChoice best = few ? skinny_choice(s) : GemmChoice{GemmKernel::kRing, 128, 256};
    double least = few ? predicted_skinny(s) : kNever;
    for (RingTile const& t : kRingTiles) {
        double const us = predicted(s, t);
        if (us >= least) continue;
        least = us;
        best = {GemmKernel::kRing, t.channels, t.tokens, t.peers > 1 ? t.peers : 0};
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
    // The wide kernels write 16-bit rows of 16-byte multiples.
    if (s.m <= 16 || (s.m <= 32 && !s.int4_weight)) return skinny_choice(s);
    if (s.capability != 90 || s.float32_out || !s.vector_rows)
        return tile_serves ? GemmChoice{GemmKernel::kTile} : skinny_choice(s);
    return s.int4_weight ? wide_choice_int4(s) : wide_choice_int8(s);
}

}  // namespace quarot
