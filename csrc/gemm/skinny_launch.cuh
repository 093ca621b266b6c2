// Host side of the few-token kernel: launch geometry, shared-memory budget.
#pragma once

#include "device/launch.cuh"
#include "gemm/skinny_kernel.cuh"

#include <algorithm>

namespace quarot::skinny {

template <typename T>
inline constexpr OutputType output_type = std::is_same_v<T, __half>          ? OutputType::kFloat16
                                          : std::is_same_v<T, __nv_bfloat16> ? OutputType::kBFloat16
                                                                             : OutputType::kFloat32;

/// `input_shared`: bytes of shared memory that a made input needs beside its codes. `most_slots`: of the ring of each warp.
template <class Weights, class Input, int TOKEN_TILES, int UNITS, int WARPS, int BLOCKS>
cudaError_t run(SkinnyProblem const& p, typename Input::Arguments const& input, int input_shared,
                int most_slots = WeightRing<Weights, UNITS, WARPS>::kMostSlots) {
    using Layout = SharedLayout<Weights, Input, TOKEN_TILES, UNITS>;
    Device const& device = current_device();
    Geometry g;
    g.units = (p.k + kUnit - 1) / kUnit;
    int const strips = (p.n + 15) / 16;
    int const code_bytes = Input::template code_bytes<Layout, WARPS>(p.m);
    using Ring = WeightRing<Weights, UNITS, WARPS>;
    bool const ring = Input::kMade && device.capability >= 90;
    int const own = Input::kMade ? 2048 : 0;  // declared by the prologues themselves
    int const limit = std::min(device.shared_per_block, device.shared_per_multiprocessor / BLOCKS - 1024) - own;
    int const budget = limit - input_shared - (ring ? Ring::bytes(1) : 0);
    int blocks = std::min(strips, device.multiprocessors * BLOCKS);
    // Where the sums of a block's strips do not fit in shared memory, more blocks run as further waves.
    while (blocks < strips && Layout::total(code_bytes, (strips + blocks - 1) / blocks) > budget)
        blocks = std::min(strips, 2 * blocks);
    g.strips_max = (strips + blocks - 1) / blocks;
    g.strips_each = strips / blocks, g.strips_over = strips % blocks;
    dim3 const grid(blocks, (p.m + Layout::kTokens - 1) / Layout::kTokens);
    if ((Input::kMade && grid.y > 1) || (Input::kOneRow && p.m != 1)) return cudaErrorInvalidValue;
    if (!Input::kAdds && p.residual != nullptr) return cudaErrorInvalidValue;
    if (Input::kMade && p.type != output_type<typename Input::Output>) return cudaErrorInvalidValue;  // OneOutput asks nobody
    if (Input::kOneChunk && g.units > WARPS * UNITS) return cudaErrorInvalidValue;
    int const used = (Layout::total(code_bytes, g.strips_max) + input_shared + 127) / 128 * 128;
    g.ring = used;
    g.ring_slots = ring ? std::min((limit - used) / Ring::bytes(1), most_slots) : 0;
    if (ring && g.ring_slots < 1) return cudaErrorInvalidValue;
    int shared = used + Ring::bytes(g.ring_slots);
    // One block an SM, whatever its registers: where two fit, the first SMs to be free take two, and others none.
    if (Input::kMade) shared = std::max(shared, device.shared_per_multiprocessor / 2);
    return launch(skinny_kernel<Weights, Input, TOKEN_TILES, UNITS, WARPS, BLOCKS>, grid, WARPS * 32, shared, p.stream, p,
                  input, g);
}

template <class Weights, int TOKEN_TILES, int UNITS, int WARPS, int BLOCKS>
cudaError_t run(SkinnyProblem const& p) {
    return run<Weights, StoredCodes, TOKEN_TILES, UNITS, WARPS, BLOCKS>(p, {}, 0);
}

}  // namespace quarot::skinny
