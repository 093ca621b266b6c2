// The end of decode attention: the warps' results are added in shared memory, the pieces' of a sequence through global
// partials by the last CTA to arrive, in a fixed order (bit-reproducible).
#pragma once

#include <math_constants.h>

#include "attention/attend_stage.cuh"
#include "attention/decode_params.h"
#include "attention/schedule.cuh"

namespace quarot {

template <typename C>
__device__ __forceinline__ void store_four(const DecodeParams& p, std::int64_t index, float4 x) {
    if (p.dtype == DType::kFloat32) {
        reinterpret_cast<float4*>(p.out)[index] = x;
    } else if (p.dtype == DType::kFloat16) {
        reinterpret_cast<uint2*>(p.out)[index] = {pack_pair<false>(x.x, x.y), pack_pair<false>(x.z, x.w)};
    } else {
        reinterpret_cast<uint2*>(p.out)[index] = {pack_pair<true>(x.x, x.y), pack_pair<true>(x.z, x.w)};
    }
}

// Output row (b, t, head) of row `row` of a kv head's query rows. One token is the common case and needs no division.
__device__ __forceinline__ std::int64_t output_row(const DecodeParams& p, int sequence, int kv_head, int row) {
    const int group = p.group;
    if (p.tokens == 1) return static_cast<std::int64_t>(sequence) * p.query_heads + kv_head * group + row;
    return (static_cast<std::int64_t>(sequence) * p.tokens + row / group) * p.query_heads + kv_head * group +
           row % group;
}

__device__ __forceinline__ float finish_lse(float peak, float sum, float bias) {
    return sum > 0.0f ? peak + log2f(sum) - bias : -CUDART_INF_F;
}

// Counts a CTA in: releases its stores (the barrier before ordered those of the other threads) and acquires the others'.
__device__ __forceinline__ int arrive(int* counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

// Adds up partial results of a row in a fixed order: one pass with a running maximum.
struct RowSum {
    float peak = kMasked, sum = 0.0f;
    float4 total{0.0f, 0.0f, 0.0f, 0.0f};

    __device__ __forceinline__ void add(float2 max_sum, float4 x) {
        const float updated = fmaxf(peak, max_sum.x);
        const float old_factor = exp2_approx(peak - updated), factor = exp2_approx(max_sum.x - updated);
        peak = updated;
        sum = sum * old_factor + factor * max_sum.y;
        total.x = total.x * old_factor + factor * x.x, total.y = total.y * old_factor + factor * x.y;
        total.z = total.z * old_factor + factor * x.z, total.w = total.w * old_factor + factor * x.w;
    }
};

template <typename C>
__device__ __forceinline__ void store_row(const DecodeParams& p, const Work& work, int row, int quad,
                                          const RowSum& result) {
    const float inverse = result.sum > 0.0f ? 1.0f / result.sum : 0.0f;
    const std::int64_t target =
        output_row(p, work.sequence, kv_head_of(p, work.column), tile_of(p, work.column) * kTileRows + row);
    store_four<C>(p, target * (C::kD / 4) + quad,
                  {result.total.x * inverse, result.total.y * inverse, result.total.z * inverse,
                   result.total.w * inverse});
    if (quad == 0) p.lse[target] = finish_lse(result.peak, result.sum, C::kProbabilityBias);
}

// Adds the warps' results (row-wise maxima, sums and outputs in shared memory), then the pieces'; writes out and lse.
template <typename C>
__device__ __forceinline__ void merge_and_store(const DecodeParams& p, const Work& work, const std::uint8_t* rings,
                                                int ring_bytes, const float2* max_sum, int warps, int* last_flag) {
    constexpr int kQuads = C::kD / 4;
    const int columns = p.kv_heads * p.tiles;
    const int rows =
        min(kTileRows, p.tokens * p.group - tile_of(p, work.column) * kTileRows);
    for (int index = threadIdx.x; index < rows * kQuads; index += blockDim.x) {
        const int row = index / kQuads, quad = index % kQuads;
        RowSum result;
        for (int w = 0; w < warps; ++w)
            result.add(max_sum[w * kTileRows + row],
                       *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(rings + w * ring_bytes) +
                                                        row * C::kRowStride + 4 * quad));
        if (work.splits == 1) {
            store_row<C>(p, work, row, quad, result);
        } else {
            const int item = work.base + work.split * columns + work.column;
            const std::int64_t slot = static_cast<std::int64_t>(item) * kTileRows + row;
            __stcg(reinterpret_cast<float4*>(p.partial) + slot * kQuads + quad, result.total);
            if (quad == 0)
                __stcg(reinterpret_cast<float2*>(p.partial_max_sum) + slot, float2{result.peak, result.sum});
        }
    }
    if (work.splits == 1) return;

    int* counter = p.counters + work.base + work.column;
    __syncthreads();
    if (threadIdx.x == 0) {
        const bool last = arrive(counter) == work.splits - 1;
        if (last) *counter = 0;  // ready for the next launch
        *last_flag = last;
    }
    __syncthreads();
    if (!*last_flag) return;
    for (int index = threadIdx.x; index < rows * kQuads; index += blockDim.x) {
        const int row = index / kQuads, quad = index % kQuads;
        RowSum result;
#pragma unroll 8
        for (int s = 0; s < work.splits; ++s) {
            const std::int64_t slot =
                static_cast<std::int64_t>(work.base + s * columns + work.column) * kTileRows + row;
            result.add(__ldcg(reinterpret_cast<const float2*>(p.partial_max_sum) + slot),
                       __ldcg(reinterpret_cast<const float4*>(p.partial) + slot * kQuads + quad));
        }
        store_row<C>(p, work, row, quad, result);
    }
}

}  // namespace quarot
