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

/// Microseconds of a tile shape: a fixed part, and one for each wave of tiles, proportional to K.
double wide_cost(GemmSize const& s, int channels, int tokens, double wave_us_at_4096) {
    int const waves = ceil_div(ceil_div(s.n, channels) * ceil_div(s.m, tokens), s.sm_count);
    return 2.3 + waves * wave_us_at_4096 * s.k / 4096;
}

/// The 64x64 tile: two blocks an SM, and later waves start block by block.
double narrow_cost(GemmSize const& s) {
    int const tiles = ceil_div(s.n, 64) * ceil_div(s.m, 64);
    double const first = tiles <= s.sm_count ? 6.5 : 8.3;
    return 2.3 + (first + 10.3 * (ceil_div(tiles, 2 * s.sm_count) - 1)) * s.k / 4096;
}

GemmChoice wide_choice(GemmSize const& s) {
    // Alternating consumers hide the epilogue of a few waves; over many they cost 5 % under the power cap.
    double const us_128x128 = s.m <= 1024 ? 11.0 : 11.7;
    GemmChoice best{GemmKernel::kWide, 128, 256};
    double cost = wide_cost(s, 128, 256, 22.0);
    auto const offer = [&](int channels, int tokens, double offered) {
        if (offered < cost) cost = offered, best = {GemmKernel::kWide, channels, tokens};
    };
    offer(128, 128, wide_cost(s, 128, 128, us_128x128));
    if (s.int4_weight) {
        offer(256, 128, wide_cost(s, 256, 128, 22.2));
        offer(64, 64, narrow_cost(s));
    }
    return best;
}

}  // namespace

GemmChoice choose_gemm(GemmSize const& s) {
    bool const tile_serves = s.int4_weight && s.m > 32 && s.group_size % 64 == 0;
    if (s.group_size > 0) return {tile_serves ? GemmKernel::kTile : GemmKernel::kGrouped};
    if (s.packed_activations) {  // not measured, for want of such a GPU: the largest tile that fills it
        if (s.m <= 64) return {GemmKernel::kInt4Cores, 64, 128};
        bool const fills = ceil_div(s.m, 128) * ceil_div(s.n, 256) >= s.sm_count;
        return {GemmKernel::kInt4Cores, 128, fills ? 256 : 128};
    }
    // The CUTLASS kernels write 16-bit rows of 16-byte multiples.
    if (s.m <= 32) return skinny_choice(s);
    if (s.capability != 90 || s.float32_out || !s.vector_rows)
        return tile_serves ? GemmChoice{GemmKernel::kTile} : skinny_choice(s);
    // Few tiles and a long K: only cutting K fills the machine.
    if (s.int4_weight && s.m <= 128 && s.n <= 8192 && s.k > 11008) return {GemmKernel::kWide, 128, 64, 1};
    return wide_choice(s);
}

}  // namespace quarot
