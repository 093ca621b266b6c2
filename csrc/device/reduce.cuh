// Reductions over a thread block with one barrier. Deterministic: fixed order, no atomics.
#pragma once

namespace quarot {

inline constexpr unsigned kFullWarp = 0xffffffffu;

// |x| as an unsigned integer. Ordered like |x|, with infinity and then NaN above everything: a maximum of these keeps
// NaN, which fmaxf drops.
__device__ __forceinline__ unsigned abs_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Maximum over the block, in every thread. scratch: 32 words, not reused before the next barrier.
__device__ __forceinline__ unsigned block_max(unsigned value, unsigned* scratch) {
    const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    value = __reduce_max_sync(kFullWarp, value);
    if (warps == 1) return value;
    if (lane == 0) scratch[warp] = value;
    __syncthreads();
    return __reduce_max_sync(kFullWarp, lane < warps ? scratch[lane] : 0u);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) value += __shfl_xor_sync(kFullWarp, value, mask);
    return value;
}

}  // namespace quarot
