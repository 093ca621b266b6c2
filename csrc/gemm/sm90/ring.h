// GEMM for many tokens with one weight scale a channel, on Hopper, without CUTLASS's layers; includes no CUTLASS.
#pragma once

#include "gemm/sm90/problem.h"

#include <algorithm>

namespace quarot::sm90 {

/// How the blocks of the kernel share the output, in strips of 64 channels.
struct RingGrid {
    int strips, channel_tiles, token_tiles;
    int waves;  ///< of one block an SM

    /// Token tiles that run next to each other, so that they find the weights in L2.
    constexpr int token_group() const { return std::min(8, token_tiles); }
    constexpr int channel_tile_of(int tile) const {
        int const per_group = token_group() * channel_tiles, before = tile / per_group * token_group();
        return tile % per_group / std::min(token_group(), token_tiles - before);
    }

    /// The first `strips % channel_tiles` channel tiles are the larger ones.
    constexpr int strips_of(int channel_tile) const {
        return strips / channel_tiles + (channel_tile < strips % channel_tiles);
    }
};

/// Tiles of up to `channels` x `tokens`: as many as fit in the waves that the fewest take, of as even a height as can be.
constexpr RingGrid ring_grid(int m, int n, int channels, int tokens, int sm_count) {
    auto const ceil_div = [](int a, int b) { return (a + b - 1) / b; };
    int const strips = ceil_div(n, 64), fewest = ceil_div(n, channels), token_tiles = ceil_div(m, tokens);
    int const waves = ceil_div(fewest * token_tiles, sm_count);
    return {strips, std::clamp(waves * sm_count / token_tiles, fewest, strips), token_tiles, waves};
}

/// Needs no workspace. `channels` x `tokens` is one of the tiles in w4a8_ring.cu, whose K `peers` blocks share (0 as 1).
cudaError_t w4a8_ring(GemmProblem const& problem, int channels, int tokens, int peers);

}  // namespace quarot::sm90
