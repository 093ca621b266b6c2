// What a warp of decode attention reads: the queries of its tile, page ids, and stages of packed tokens.
#pragma once

#include <cuda_fp16.h>

#include "attention/attend_stage.cuh"
#include "attention/decode_params.h"
#include "attention/ring.cuh"
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

// Page ids of a warp's stages, one block a lane: lane l holds block l % Blocks of stage (l / Blocks) of a batch of stages.
template <typename C>
struct PageIds {
    static constexpr int kBatch = 32 / C::kBlocks;

    __device__ __forceinline__ static int load(const DecodeParams& p, const Work& work, int batch, int warp, int warps,
                                               int lane) {
        const int stage = work.first + warp + (batch * kBatch + lane / C::kBlocks) * warps;
        const int block = stage * C::kBlocks + lane % C::kBlocks;
        if (stage >= work.last || block * kBlockTokens >= work.length) return 0;  // past the end: may be garbage
        const int id = *reinterpret_cast<const volatile int*>(p.page_table +
                                                              static_cast<std::int64_t>(work.sequence) * p.max_pages +
                                                              block / p.page_blocks);
        return min(max(id, 0), p.num_pages - 1);  // never a wild address, whatever the caller passes
    }
};

// Copies a stage into a slot of the ring, or with `ToL2` only brings it into L2.
template <typename C, bool ToL2 = false>
__device__ __forceinline__ void issue_stage(const DecodeParams& p, const Work& work, const Ring& ring, int stage,
                                            int slot, int ids, int ids_lane, int kv_head, int lane) {
    const int first_block = stage * C::kBlocks;
    const int count = min(C::kBlocks, (work.length + kBlockTokens - 1) / kBlockTokens - first_block);
    const auto source = [&](int id, int block) {
        const std::int64_t index = (static_cast<std::int64_t>(id) * p.kv_heads + kv_head) * p.page_blocks;
        return p.pool + (index + block % p.page_blocks) * C::kBlockBytes;
    };
    const auto copy = [&](int offset, const std::uint8_t* from, int bytes) {
        if constexpr (ToL2) {
            ring.prefetch(from, bytes, lane);
        } else {
            ring.copy(slot, offset, from, bytes, lane);
        }
    };
    if constexpr (!ToL2) ring.expect(slot, count * C::kBlockBytes, lane);
    if (p.page_blocks % C::kBlocks == 0) {  // a stage lies within one page: one copy
        const int id = __shfl_sync(kFullWarp, ids, ids_lane);
        if (!QUAROT_BULK_COPY || lane == 0) copy(0, source(id, first_block), count * C::kBlockBytes);
    } else if (QUAROT_BULK_COPY) {
        const int id = __shfl_sync(kFullWarp, ids, ids_lane + lane % C::kBlocks);
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
