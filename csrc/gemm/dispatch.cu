// The choice of kernel by size. Every number here was measured on an H200 (NOTES.md, "Dispatch") unless it says
// otherwise.
#include "gemm/dispatch.h"

#include <algorithm>

namespace quarot {
namespace {

constexpr int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

GemmChoice skinny_choice(GemmSize const& s) {
    int const tokens = s.m <= 8 ? 8 : s.m <= 16 ? 16 : 32;
    return {GemmKernel::kSkinny, tokens, 16, 2, 1};
}

/// Splits K so that the blocks come close to one an SM; wider clusters than that only add reduction work.
GemmChoice split_k_choice(GemmSize const& s) {
    int const tokens = s.m <= 32 ? 32 : s.m <= 64 ? 64 : 128;
    GemmChoice best{GemmKernel::kSplitK, tokens, 4, 0, 1};
    double best_cost = 1e30;
    for (int warpgroups = 2; warpgroups <= (tokens > 64 ? 3 : 4); ++warpgroups) {
        for (int cluster = 1; cluster <= 8; ++cluster) {
            int const clusters = ceil_div(s.n, 64 * warpgroups);
            int const waves = ceil_div(clusters * cluster, s.sm_count / cluster * cluster);
            double const work = double(waves) * warpgroups * ceil_div(s.k / 32, cluster);
            double const cost = work + 24 * waves + 4 * cluster;
            if (cost < best_cost) {
                best_cost = cost;
                best.b = warpgroups;
                best.d = cluster;
            }
        }
    }
    return best;
}

GemmChoice wide_choice(GemmSize const& s) {
    auto const waves = [&](int channels, int tokens) {
        return ceil_div(ceil_div(s.n, channels) * ceil_div(s.m, tokens), s.sm_count);
    };
    if (!s.int4_weight)
        return s.m <= 512 ? GemmChoice{GemmKernel::kWide, 128, 128} : GemmChoice{GemmKernel::kWide, 128, 256};
    if (s.m <= 64) return {GemmKernel::kWide, 128, 64};
    if (s.m <= 128)
        return waves(256, 128) * 2 <= waves(128, 64) * 2 ? GemmChoice{GemmKernel::kWide, 256, 128}
                                                         : GemmChoice{GemmKernel::kWide, 128, 64};
    // Cost of a wave relative to a 128x256 one; the narrow tiles pay more per token.
    double const c256 = waves(128, 256) * 1.0, c128 = waves(128, 128) * 0.53, c64 = waves(128, 64) * 0.36;
    if (c64 < std::min(c128, c256)) return {GemmKernel::kWide, 128, 64};
    return c128 < c256 ? GemmChoice{GemmKernel::kWide, 128, 128} : GemmChoice{GemmKernel::kWide, 128, 256};
}

}  // namespace

GemmChoice choose_gemm(GemmSize const& s) {
    if (s.grouped) return {GemmKernel::kGrouped};
    if (s.packed_activations) {  // not measured: no Ampere at hand; the waves argument of the CUTLASS profiler tables
        if (s.m <= 64) return {GemmKernel::kInt4Cores, 64, 128};
        return ceil_div(s.m, 128) * ceil_div(s.n, 256) >= s.sm_count ? GemmChoice{GemmKernel::kInt4Cores, 128, 256}
                                                                     : GemmChoice{GemmKernel::kInt4Cores, 128, 128};
    }
    if (s.capability != 90) return skinny_choice(s);
    if (s.m <= 16) return skinny_choice(s);
    if (s.int4_weight && (s.float32_out || s.m <= 64)) return split_k_choice(s);
    if (s.float32_out || s.m <= 32) return skinny_choice(s);
    return wide_choice(s);
}

}  // namespace quarot
