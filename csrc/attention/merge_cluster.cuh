// The end of decode attention by clusters: every warp stores its result straight into the shared memory of the CTAs that
// add it up, each CTA a slice of the dims, and counts the bytes at their mbarrier.
//
// All sums run in a fixed order: bit-reproducible.
#pragma once

#include "attention/attend_stage.cuh"
#include "attention/decode_params.h"
#include "attention/merge_parts.cuh"
#include "attention/ring.cuh"
#include "device/cluster.cuh"

namespace quarot {

// What a CTA of a cluster adds up: 2^shift mmas (16 dims each), for every part (warp of the cluster) an area of 8 rows x 16
// dims a mma and 4 floats of padding, and (max, sum) of every row.
template <typename C>
struct Slice {
    static_assert((C::kMmas & (C::kMmas - 1)) == 0, "a CTA takes a power of two of mmas");
    int shift, part_floats;

    __device__ __forceinline__ explicit Slice(const DecodeParams& p)
        : shift(p.slice_shift), part_floats((16 * kTileRows << p.slice_shift) + 4) {}

    // Of `parts` results of `rows` rows, as sent.
    __device__ __forceinline__ int bytes(int parts, int rows) const { return parts * rows * ((64 << shift) + 8); }
};

// Stores a warp's result as part `part` of its cluster into the areas of all CTAs. Rows past `rows` are left out.
template <typename C>
__device__ __forceinline__ void send_part(const WarpState<C>& state, float* area, float2* max_sum, std::uint32_t mbarrier,
                                          const Slice<C>& slice, int cluster, int part, int rows, int lane) {
    const int row = 2 * (lane % 4);
    const std::uint32_t target = shared_address(area + part * slice.part_floats + row * 16 + 2 * (lane / 4));
#pragma unroll
    for (int column = 0; column < 2; ++column)
        if (row + column < rows)
            state.for_each_output([&](int mma, int other, float2 x) {
                const int place = (mma & ((1 << slice.shift) - 1)) * kTileRows + column;
                if (other == column) store_remote(target + place * 64, mbarrier, mma >> slice.shift, x);
            });
    const std::uint32_t target_max_sum = shared_address(max_sum + part * kTileRows + row);
#pragma unroll
    for (int column = 0; column < 2; ++column)
        if (lane / 4 < cluster && row + column < rows)
            store_remote(target_max_sum + 8 * column, mbarrier, lane / 4, float2{state.max[column], state.sum[column]});
}

// Half a warp adds up four dims of `count` parts of a row: lane `sub` of it takes parts sub, sub + 16 ... Part i has its
// (max, sum) at max_sum[i * kTileRows] and its dims at quad[i * part_floats].
__device__ __forceinline__ RowSum add_parts(int count, int sub, const float2* max_sum, const float* quad, int part_floats) {
    RowSum result;
#pragma unroll 1
    for (int i = sub; i < count; i += 16) result.peak = fmaxf(result.peak, max_sum[i * kTileRows].x);
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2)
        result.peak = fmaxf(result.peak, __shfl_xor_sync(kFullWarp, result.peak, distance));
#pragma unroll 1
    for (int i = sub; i < count; i += 16) {
        const float2 ms = max_sum[i * kTileRows];
        const float4 x = *reinterpret_cast<const float4*>(quad + i * part_floats);
        const float factor = exp2_approx(ms.x - result.peak);
        result.sum += factor * ms.y;
        result.total.x += factor * x.x, result.total.y += factor * x.y;
        result.total.z += factor * x.z, result.total.w += factor * x.w;
    }
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) {
        result.sum += __shfl_xor_sync(kFullWarp, result.sum, distance);
        result.total.x += __shfl_xor_sync(kFullWarp, result.total.x, distance);
        result.total.y += __shfl_xor_sync(kFullWarp, result.total.y, distance);
        result.total.z += __shfl_xor_sync(kFullWarp, result.total.z, distance);
        result.total.w += __shfl_xor_sync(kFullWarp, result.total.w, distance);
    }
    return result;
}

// Adds the `count` parts that arrived in this CTA, writes its slice of out, and lse.
template <typename C>
__device__ __forceinline__ void merge_slice(const DecodeParams& p, const Work& work, const float* area,
                                            const float2* max_sum, const Slice<C>& slice, int count, int rank, int rows) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, sub = lane % 16;
    const int shift = slice.shift + 2, items = rows << shift, first = rank << shift;  // quads of the slice
    for (int base = 2 * warp; base < items; base += 2 * warps) {  // the same number of rounds for a whole warp
        const int item = min(base + lane / 16, items - 1), row = item >> shift, quad = item & ((1 << shift) - 1);
        const float* mine = area + (quad / 4 * kTileRows + row) * 16 + 4 * (quad % 4);
        const RowSum result = add_parts(count, sub, max_sum + row, mine, slice.part_floats);
        if (base + lane / 16 < items && sub == 0) store_row<C>(p, work, row, first + quad, result);
    }
}

}  // namespace quarot
