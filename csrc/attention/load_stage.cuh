// What a warp of decode attention reads: the queries of its tile, page ids, and stages of packed tokens.
#pragma once

#include <cuda_fp16.h>

#include "attention/attend_stage.cuh"
#include "attention/decode_params.h"
#include "attention/ring.cuh"
#include "attention/rotate_query.cuh"
#include "attention/schedule.cuh"

namespace quarot {

// q of the tile in two steps, so that the loads are in flight while other things are looked up. Lane: row lane / 4, dims
// 16 i + 4 (lane % 4) .. + 3 as two pairs of 16-bit floats (queries in float32 are rounded here).
template <typename C>
__device__ __forceinline__ void load_query(const void* row, DType dtype, bool valid, std::uint32_t (&raw)[C::kMmas][2],
                                           int lane) {
#pragma unroll
    for (int i = 0; i < C::kMmas; ++i) {
        const int dim = 16 * i + 4 * (lane % 4);
        raw[i][0] = raw[i][1] = 0;
        if (!valid) continue;
        if (dtype == DType::kFloat32) {
            const float4 x = *reinterpret_cast<const float4*>(static_cast<const float*>(row) + dim);
            raw[i][0] = pack_pair<C::kBf16>(x.x, x.y), raw[i][1] = pack_pair<C::kBf16>(x.z, x.w);
        } else {
            // Volatile: issued here, not where the values are used.
            asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                         : "=r"(raw[i][0]), "=r"(raw[i][1])
                         : "l"(static_cast<const std::uint16_t*>(row) + dim));
        }
    }
}

// To mma operands, in place: pairs (0, 2) and (1, 3), fp16 unless the pool is raw bf16. sums: q over every key group.
template <typename C>
__device__ __forceinline__ void finish_query(std::uint32_t (&query)[C::kMmas][2], bool from_bf16,
                                             float (&sums)[C::kKeyGroups]) {
#pragma unroll
    for (int group = 0; group < C::kKeyGroups; ++group) sums[group] = 0.0f;
#pragma unroll
    for (int i = 0; i < C::kMmas; ++i) {
        std::uint32_t even = __byte_perm(query[i][0], query[i][1], 0x5410);
        std::uint32_t odd = __byte_perm(query[i][0], query[i][1], 0x7632);
        if (from_bf16 && !C::kBf16) {
            even = pack_pair<false>(__uint_as_float(even << 16), __uint_as_float(even & 0xffff0000u));
            odd = pack_pair<false>(__uint_as_float(odd << 16), __uint_as_float(odd & 0xffff0000u));
        }
        query[i][0] = even, query[i][1] = odd;
        if constexpr (C::kKeyBits != 16) {
            const float2 x = __half22float2(*reinterpret_cast<__half2*>(&even));
            const float2 y = __half22float2(*reinterpret_cast<__half2*>(&odd));
            sums[16 * i / C::kKeyGroup] += (x.x + x.y) + (y.x + y.y);
        }
    }
}

// The loaded queries as mma operands and, for every key group, the sums over the dims of the lane's two columns. With R3 the
// CTA rotates all rows of the tile in `rotated` [8, D] first (a power of two; other orders are rotated before the launch).
template <typename C, typename Source>
__device__ __forceinline__ void make_query(const DecodeParams& p, const Source& source, int tile, int rows,
                                           std::uint16_t* rotated, std::uint32_t (&query)[C::kMmas][2],
                                           float (&query_sum)[C::kKeyGroups][2], int warp, int warps, int lane) {
    float sums[C::kKeyGroups];
    if (p.rotate_order != 0) {
        if constexpr ((C::kD & (C::kD - 1)) == 0) {
            constexpr int kPer = C::kD / 32;
            for (int r = warp; r < kTileRows; r += warps) {
                float x[kPer];
                const int row = tile * kTileRows + r;
#pragma unroll
                for (int i = 0; i < kPer; ++i)
                    x[i] = row < rows ? load_as_float(source(row), p.dtype, kPer * lane + i) : 0.0f;
                rotate_registers<C::kD>(x, lane);
#pragma unroll
                for (int i = 0; i < kPer; i += 2)
                    reinterpret_cast<std::uint32_t*>(rotated)[(r * C::kD + kPer * lane + i) / 2] =
                        pack_pair<C::kBf16>(x[i], x[i + 1]);
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < C::kMmas; ++i) {
            const uint2 two = *reinterpret_cast<const uint2*>(rotated + lane / 4 * C::kD + 16 * i + 4 * (lane % 4));
            query[i][0] = two.x, query[i][1] = two.y;
        }
    }
    finish_query<C>(query, p.rotate_order == 0 && p.dtype == DType::kBFloat16, sums);
    if constexpr (C::kKeyBits != 16) {
#pragma unroll
        for (int g = 0; g < C::kKeyGroups; ++g) {
            sums[g] += __shfl_xor_sync(kFullWarp, sums[g], 1);
            sums[g] += __shfl_xor_sync(kFullWarp, sums[g], 2);
            sums[g] *= p.scale_log2;
            query_sum[g][0] = __shfl_sync(kFullWarp, sums[g], 8 * (lane % 4));
            query_sum[g][1] = __shfl_sync(kFullWarp, sums[g], 8 * (lane % 4) + 4);
        }
    }
}

// Page ids of a worker's stages of 2^shift blocks, one block a lane: lane l holds block l % 2^shift of stage l / 2^shift of a
// batch of 32 / 2^shift. Worker w of W has the stages work.first + w + i W.
__device__ __forceinline__ int load_page_ids(const DecodeParams& p, const Work& work, int shift, int batch, int worker,
                                             int workers, int lane) {
    const int stage = work.first + worker + ((batch << (5 - shift)) + (lane >> shift)) * workers;
    const int block = (stage << shift) + (lane & ((1 << shift) - 1));
    if (stage >= work.last || block * kBlockTokens >= work.length) return 0;  // past the end: may be garbage
    const int id = *reinterpret_cast<const volatile int*>(
        p.page_table + static_cast<std::int64_t>(work.sequence) * p.max_pages +
        (p.page_shift >= 0 ? block >> p.page_shift : block / p.page_blocks));
    return min(max(id, 0), p.num_pages - 1);  // never a wild address, whatever the caller passes
}

// Copies stage i of a worker (of 2^shift blocks) into a slot of the ring, or with `ToL2` only brings it into L2. `ids`: of
// the batch of stages it belongs to.
template <typename C, bool ToL2 = false>
__device__ __forceinline__ void issue_stage(const DecodeParams& p, const Work& work, const Ring& ring, int stage,
                                            int i, int shift, int slot, int ids, int kv_head, int lane) {
    const int blocks = 1 << shift, first_block = stage << shift, ids_lane = i << shift & 31;
    const int count = min(blocks, (work.length + kBlockTokens - 1) / kBlockTokens - first_block);
    const auto source = [&](int id, int block) {
        const std::int64_t index = (static_cast<std::int64_t>(id) * p.kv_heads + kv_head) * p.page_blocks;
        const int place = p.page_shift >= 0 ? block & (p.page_blocks - 1) : block % p.page_blocks;
        return p.pool + (index + place) * C::kBlockBytes;
    };
    const auto copy = [&](int offset, const std::uint8_t* from, int bytes) {
        if constexpr (ToL2) {
            ring.prefetch(from, bytes, lane);
        } else {
            ring.copy(slot, offset, from, bytes, lane);
        }
    };
    if constexpr (!ToL2) ring.expect(slot, count * C::kBlockBytes, lane);
    if ((p.page_blocks & (blocks - 1)) == 0) {  // a stage lies within one page: one copy
        const int id = __shfl_sync(kFullWarp, ids, ids_lane);
        if (!QUAROT_BULK_COPY || lane == 0) copy(0, source(id, first_block), count * C::kBlockBytes);
    } else if (QUAROT_BULK_COPY) {
        const int id = __shfl_sync(kFullWarp, ids, ids_lane + (lane & (blocks - 1)));
        __syncwarp();  // the expectation first
        if (lane < count) copy(lane * C::kBlockBytes, source(id, first_block + lane), C::kBlockBytes);
    } else {
        for (int block = 0; block < count; ++block) {
            const int id = __shfl_sync(kFullWarp, ids, ids_lane + block);
            copy(block * C::kBlockBytes, source(id, first_block + block), C::kBlockBytes);
        }
    }
}

}  // namespace quarot
