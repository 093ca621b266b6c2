// Host side of the few-token kernel: launch geometry, shared-memory budget.
#pragma once

#include "device/launch.cuh"
#include "gemm/skinny_kernel.cuh"

#include <algorithm>

namespace quarot::skinny {

/// `input_shared`: bytes of shared memory that a made input needs beside its codes.
template <class Weights, class Input, int TOKEN_TILES, int UNITS, int WARPS, int BLOCKS>
cudaError_t run(SkinnyProblem const& p, typename Input::Arguments const& input, int input_shared) {
    using Layout = SharedLayout<Weights, TOKEN_TILES, UNITS>;
    Device const& device = current_device();
    Geometry g;
    g.units = (p.k + kUnit - 1) / kUnit;
    int const strips = (p.n + 15) / 16;
    int const budget =
        std::min(device.shared_per_block, device.shared_per_multiprocessor / BLOCKS - 1024) - input_shared;
    int blocks = std::min(strips, device.multiprocessors * BLOCKS);
    // Where the sums of a block's strips do not fit in shared memory, more blocks run as further waves.
    while (blocks < strips && Layout::total(WARPS, (strips + blocks - 1) / blocks) > budget)
        blocks = std::min(strips, 2 * blocks);
    g.strips_max = (strips + blocks - 1) / blocks;
    g.strip_step = ((uint64_t(strips) << 32) + blocks - 1) / blocks;
    dim3 const grid(blocks, (p.m + Layout::kTokens - 1) / Layout::kTokens);
    if (Input::kMade && grid.y > 1) return cudaErrorInvalidValue;
    if (Input::kOneChunk && g.units > WARPS * UNITS) return cudaErrorInvalidValue;
    return launch(skinny_kernel<Weights, Input, TOKEN_TILES, UNITS, WARPS, BLOCKS>, grid, WARPS * 32,
                  Layout::total(WARPS, g.strips_max) + input_shared, p.stream, p, input, g);
}

template <class Weights, int TOKEN_TILES, int UNITS, int WARPS, int BLOCKS>
cudaError_t run(SkinnyProblem const& p) {
    return run<Weights, StoredCodes, TOKEN_TILES, UNITS, WARPS, BLOCKS>(p, {}, 0);
}

}  // namespace quarot::skinny
