// Decode attention on the packed cache with tensor cores: S^T = K Q^T with tokens as M16 and query rows as N8.
//
// CTA = (split, kv head and tile of 8 query rows, sequence). Every warp fills its own ring (ring.cuh) with stages of
// `Blocks` blocks and keeps its own running softmax; the warps of a CTA merge in shared memory, the splits of a sequence
// through global partials, added by the last CTA to arrive in fixed order (bit-reproducible).
//
// Score of a token: s (q . code) + b sum(q); output: sum (p s) code + sum p b. Scale and offset never meet single codes.
#pragma once

#include <cuda_runtime.h>
#include <math_constants.h>

#include "attention/decode_params.h"
#include "attention/fragment.cuh"
#include "attention/ring.cuh"
#include "attention/rotate_query.cuh"
#include "attention/schedule.cuh"
#include "device/launch.cuh"
#include "kv_cache/format.h"

namespace quarot {

constexpr int kTileRows = 8;
constexpr float kMasked = -1e30f;

template <int D, int KeyBits, int ValueBits, int KeyGroup, int ValueGroup, int Blocks_, bool Bf16_ = false>
struct DecodeConfig {
    static constexpr KVFormat kFormat{D, KeyBits, ValueBits, KeyGroup, ValueGroup};
    static constexpr int kD = D, kKeyBits = KeyBits, kValueBits = ValueBits;
    static constexpr int kKeyGroups = KeyBits == 16 ? 1 : D / KeyGroup;
    static constexpr int kValueGroups = ValueBits == 16 ? 1 : D / ValueGroup;
    static constexpr int kKeyGroup = D / kKeyGroups, kValueGroup = D / kValueGroups;
    static constexpr int kBlocks = Blocks_;
    static constexpr bool kBf16 = Bf16_;  // raw 16-bit pools of a bf16 model; packed pools always compute in fp16
    static constexpr int kMmas = D / 16;
    static constexpr int kStageTokens = 16 * kBlocks;
    static constexpr int kBlockBytes = kFormat.block_bytes();
    static constexpr int kStageBytes = kBlocks * kBlockBytes;
    // 12 warps on an SM (4 CTAs of 3) leave 168 registers; wide heads, several groups and the many power-of-two classes
    // of narrow codes need more and get 8 or 9 warps.
    static constexpr bool kFewRegisters =
        D <= 128 && kKeyGroups == 1 && kValueGroups == 1 && code_classes(KeyBits) <= 2 && ValueBits != 3;
    static constexpr int kRegisterThreads = kFewRegisters || D == 64 ? 384 : 256;
    static constexpr int kRowStride = D + 4;  // of the merge area, floats: keeps float2 writes free of bank conflicts
    static_assert(kTileRows * kRowStride * 4 <= kStageBytes, "the merge reuses the warp's ring");
    static_assert((KeyBits == 16) == (ValueBits == 16), "mixes of raw and packed are served by the generic kernel");
    // p is scaled by a power of two before it is rounded to fp16 with the value scale, against underflow: at most
    // 65504 / (range of a group) keeps p s below the fp16 maximum for every group an fp16 model can produce.
    static constexpr float kProbabilityBias = ValueBits == 16 ? 0.0f : static_cast<float>(ValueBits);
};

// What a warp carries from stage to stage. A lane holds columns (query rows of the tile) 2 (lane % 4) and the next.
template <typename C>
struct WarpState {
    float out[C::kMmas][4];  // mma i: dims 16 i + 2 (lane / 4), + 1 (pairs of registers), both columns
    float max[2], sum[2];
    float offset_sum[C::kValueGroups][2];  // sum p b
};

struct RowLimits {
    int end[2], start[2];  // of the two columns of the lane: visible tokens are start <= j < end
};

template <typename C, bool Masked>
__device__ __forceinline__ void attend_stage(const std::uint8_t* stage, int blocks, int base_token, int length,
                                             const RowLimits& limits, const std::uint32_t (&query)[C::kMmas][2],
                                             const float (&query_sum)[C::kKeyGroups][2], float scale_log2,
                                             WarpState<C>& state, int lane) {
    constexpr KVFormat kFormat = C::kFormat;
    const int row = lane / 4;
    float score[C::kBlocks][4];
#pragma unroll
    for (int block = 0; block < C::kBlocks; ++block) {
        const std::uint8_t* codes = stage + block * C::kBlockBytes;
        constexpr int kClasses = code_classes(C::kKeyBits);
        float dot[C::kKeyGroups][kClasses][4];
#pragma unroll
        for (int i = 0; i < C::kKeyGroups * kClasses * 4; ++i) (&dot[0][0][0])[i] = 0.0f;
        for_each_chunk<C::kD, plane_width(C::kKeyBits)>([&](auto dims, auto base) {
            constexpr int kDims = decltype(dims)::value, kBase = decltype(base)::value;
            using Codes = ChunkCodes<C::kKeyBits, kDims>;
            Codes half[2];
            const std::uint8_t* plane = codes + 2 * kBase * Codes::kWidth;
            const std::uint8_t* high = codes + 4 * C::kD + 2 * kBase;
            half[0].load(plane, high, lane);
            half[1].load(plane + kDims * Codes::kWidth, high + kDims, lane);
            const auto step = [&](auto index) {
                constexpr int i = decltype(index)::value, kMma = kBase / 16 + i;
                mma<C::kBf16>(dot[kMma * 16 / C::kKeyGroup][i % Codes::kClasses], half[0].template operand<i, 0>(),
                              half[1].template operand<i, 0>(), half[0].template operand<i, 1>(),
                              half[1].template operand<i, 1>(), query[kMma][0], query[kMma][1]);
            };
            for_each_index<kDims / 16>(step);
        });
        if constexpr (C::kKeyBits == 16) {
#pragma unroll
            for (int i = 0; i < 4; ++i) score[block][i] = dot[0][0][i] * scale_log2;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) score[block][i] = 0.0f;
#pragma unroll
            for (int group = 0; group < C::kKeyGroups; ++group) {
                const std::uint8_t* params = codes + kFormat.param_offset(Side::kKey) + 64 * group + 4 * row;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 sb = __half22float2(*reinterpret_cast<const __half2*>(params + 32 * half));
                    const float scale = sb.x * (scale_log2 * 16777216.0f);  // 2^24: codes come as code x 2^-24
#pragma unroll
                    for (int column = 0; column < 2; ++column) {
                        float total = dot[group][kClasses - 1][2 * half + column];
#pragma unroll
                        for (int c = kClasses - 2; c >= 0; --c)
                            total = total * (1.0f / (1 << plane_width(C::kKeyBits))) + dot[group][c][2 * half + column];
                        score[block][2 * half + column] += scale * total + sb.y * query_sum[group][column];
                    }
                }
            }
        }
        if constexpr (Masked) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = base_token + 16 * block + row + 8 * (i / 2);
                const bool visible = block < blocks && token < limits.end[i % 2] && token >= limits.start[i % 2];
                score[block][i] = visible ? score[block][i] : kMasked;
            }
        }
    }

    float peak[2] = {kMasked, kMasked};
#pragma unroll
    for (int block = 0; block < C::kBlocks; ++block)
#pragma unroll
        for (int i = 0; i < 4; ++i) peak[i % 2] = fmaxf(peak[i % 2], score[block][i]);
#pragma unroll
    for (int distance = 4; distance <= 16; distance *= 2) {
        peak[0] = fmaxf(peak[0], __shfl_xor_sync(kFullWarp, peak[0], distance));
        peak[1] = fmaxf(peak[1], __shfl_xor_sync(kFullWarp, peak[1], distance));
    }
    if (__any_sync(kFullWarp, peak[0] > state.max[0] || peak[1] > state.max[1])) {
        float factor[2];
#pragma unroll
        for (int column = 0; column < 2; ++column) {
            const float updated = fmaxf(state.max[column], peak[column]);
            factor[column] = exp2_approx(state.max[column] - updated);
            state.max[column] = updated;
            state.sum[column] *= factor[column];
#pragma unroll
            for (int group = 0; group < C::kValueGroups; ++group) state.offset_sum[group][column] *= factor[column];
        }
#pragma unroll
        for (int i = 0; i < C::kMmas; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) state.out[i][j] *= factor[j % 2];
    }
    const float shift[2] = {C::kProbabilityBias - state.max[0], C::kProbabilityBias - state.max[1]};

#pragma unroll
    for (int block = 0; block < C::kBlocks; ++block) {
        const std::uint8_t* codes = stage + block * C::kBlockBytes;
        float p[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[i] = exp2_approx(score[block][i] + shift[i % 2]);
            if (Masked && score[block][i] == kMasked) p[i] = 0.0f;
            state.sum[i % 2] += p[i];
        }
        std::uint32_t weights[C::kValueGroups][2];
#pragma unroll
        for (int group = 0; group < C::kValueGroups; ++group) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float2 sb{1.0f, 0.0f};
                if constexpr (C::kValueBits != 16) {
                    sb = __half22float2(*reinterpret_cast<const __half2*>(
                        codes + kFormat.param_offset(Side::kValue) + 64 * group + 4 * row + 32 * half));
                    if (Masked && base_token + 16 * block + row + 8 * half >= length) sb = float2{0.0f, 0.0f};
                    state.offset_sum[group][0] += p[2 * half] * sb.y;
                    state.offset_sum[group][1] += p[2 * half + 1] * sb.y;
                }
                weights[group][half] =
                    transpose8x8(pack_pair<C::kBf16>(p[2 * half] * sb.x, p[2 * half + 1] * sb.x));
            }
        }
        std::uint32_t keep[2] = {kFullWarp, kFullWarp};  // raw values of unused slots may be NaN, and NaN x 0 is NaN
        if constexpr (Masked && C::kValueBits == 16) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = base_token + 16 * block + 8 * half + 2 * (lane % 4);
                keep[half] = (token < length ? 0x0000ffffu : 0u) | (token + 1 < length ? 0xffff0000u : 0u);
            }
        }
        for_each_chunk<C::kD, plane_width(C::kValueBits)>([&](auto dims, auto base) {
            constexpr int kDims = decltype(dims)::value, kBase = decltype(base)::value;
            using Codes = ChunkCodes<C::kValueBits, kDims>;
            Codes half[2];
            const std::uint8_t* plane = codes + kFormat.code_offset(Side::kValue) + 2 * kBase * Codes::kWidth;
            const std::uint8_t* high = codes + kFormat.code_offset(Side::kValue) + 4 * C::kD + 2 * kBase;
            half[0].load(plane, high, lane);
            half[1].load(plane + kDims * Codes::kWidth, high + kDims, lane);
            if constexpr (Masked && C::kValueBits == 16) {
#pragma unroll
                for (int i = 0; i < Codes::kWords; ++i) half[0].low[i] &= keep[0], half[1].low[i] &= keep[1];
            }
            const auto step = [&](auto index) {
                constexpr int i = decltype(index)::value, kMma = kBase / 16 + i;
                constexpr int kGroup = kMma * 16 / C::kValueGroup;
                mma<C::kBf16>(state.out[kMma], half[0].template operand<i, 0>(), half[0].template operand<i, 1>(),
                              half[1].template operand<i, 0>(), half[1].template operand<i, 1>(), weights[kGroup][0],
                              weights[kGroup][1]);
            };
            for_each_index<kDims / 16>(step);
        });
    }
}

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

// Output row (b, t, head) of row `row` of a kv head's query rows.
__device__ __forceinline__ std::int64_t output_row(const DecodeParams& p, int sequence, int kv_head, int row) {
    const int group = p.query_heads / p.kv_heads;
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
        output_row(p, work.sequence, work.column / p.tiles, work.column % p.tiles * kTileRows + row);
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
        min(kTileRows, p.tokens * (p.query_heads / p.kv_heads) - work.column % p.tiles * kTileRows);
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

// Bytes of dynamic shared memory: rings | mbarriers | (max, sum) of the warps | rotated queries.
template <typename C>
constexpr int decode_shared_bytes(int warps, int stages, bool rotate) {
    return warps * (stages * (C::kStageBytes + 8) + kTileRows * 8) + (rotate ? kTileRows * C::kD * 2 : 0);
}

template <typename C>
__global__ void __launch_bounds__(C::kRegisterThreads, 1) decode_kernel(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) std::uint8_t shared[];
    __shared__ int last_flag;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int group = p.query_heads / p.kv_heads, rows = p.tokens * group;
    const int stages = p.ring_stages, ring_bytes = stages * C::kStageBytes;
    auto* mbarriers = reinterpret_cast<std::uint64_t*>(shared + warps * ring_bytes);
    auto* max_sum = reinterpret_cast<float2*>(mbarriers + warps * stages);
    auto* rotated = reinterpret_cast<std::uint16_t*>(max_sum + warps * kTileRows);
    std::uint8_t* my_ring = shared + warp * ring_bytes;
    const Ring ring(my_ring, mbarriers + warp * stages, stages, C::kStageBytes, lane);
    unsigned parities = 0;  // bit = parity the next wait on that slot looks for

    for (int k = 0;; ++k) {
        Work work = find_work(p, item_index(k), C::kStageTokens, lane);
        int ids = PageIds<C>::load(p, work, 0, warp, warps, lane);
        int issued = 0;
        const auto stage_of = [&](int i) { return work.first + warp + i * warps; };
        const auto issue_next = [&](int slot) {
            if (stage_of(issued) < work.last)
                issue_stage<C>(p, work, ring, stage_of(issued), slot, ids,
                               issued % PageIds<C>::kBatch * C::kBlocks, work.column / p.tiles, lane);
            ring.commit();
            ++issued;
        };
        const auto query_source = [&](int row) -> const void* {
            return static_cast<const std::uint8_t*>(p.query) +
                   output_row(p, work.sequence, work.column / p.tiles, row) * C::kD *
                       (p.dtype == DType::kFloat32 ? 4 : 2);
        };
        std::uint32_t query[C::kMmas][2];
        const auto load_my_query = [&] {
            const int row = work.column % p.tiles * kTileRows + lane / 4;
            if (work.sequence >= 0 && p.rotate_order == 0)
                load_query<C>(query_source(row), p.dtype, row < rows, query, lane);
        };

        if (k == 0) {
            // Before the programmatic-launch wait only what the previous kernel cannot be writing is fetched: stages of
            // tokens older than the T new ones. Lengths and page ids are read again after the wait and the ring is
            // restarted in the unlikely case that they changed, so a producer of them may run right before.
            const auto is_old = [&](int i) {
                return stage_of(i) < work.last && (stage_of(i) + 1) * C::kStageTokens <= work.length - p.tokens;
            };
            while (issued < stages && is_old(issued)) issue_next(issued);
            if (issued < stages && stage_of(issued) < work.last)  // the new tokens' stage: into L2 only
                issue_stage<C, true>(p, work, ring, stage_of(issued), 0, ids,
                                     issued % PageIds<C>::kBatch * C::kBlocks, work.column / p.tiles, lane);
            pdl_wait();
            pdl_trigger();
            load_my_query();
            const int ids_now = PageIds<C>::load(p, work, 0, warp, warps, lane);
            const Work now = find_work(p, item_index(0), C::kStageTokens, lane);
            if (__any_sync(kFullWarp, !(now == work) || ids_now != ids)) {
                for (int i = 0; i < issued; ++i) ring.wait_all(i, 0);
                parities = (1u << issued) - 1;
                issued = 0;
                work = now;
                ids = PageIds<C>::load(p, work, 0, warp, warps, lane);
                load_my_query();
            }
        } else {
            load_my_query();
        }
        if (work.sequence < 0) return;
        while (issued < stages) issue_next(issued);
        int ids_next = PageIds<C>::load(p, work, 1, warp, warps, lane);
        const int tile = work.column % p.tiles;

        float query_sum[C::kKeyGroups][2];
        {
            float sums[C::kKeyGroups];
            if (p.rotate_order != 0) {
                if constexpr ((C::kD & (C::kD - 1)) == 0) {
                    constexpr int kPer = C::kD / 32;
                    for (int r = warp; r < kTileRows; r += warps) {
                        float x[kPer];
                        const int row = tile * kTileRows + r;
#pragma unroll
                        for (int i = 0; i < kPer; ++i)
                            x[i] = row < rows ? load_as_float(query_source(row), p.dtype, kPer * lane + i) : 0.0f;
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

        RowLimits limits;
        const int first_end = work.length - p.tokens + 1;  // of query token 0
#pragma unroll
        for (int column = 0; column < 2; ++column) {
            const int row = min(tile * kTileRows + 2 * (lane % 4) + column, rows - 1);
            limits.end[column] = first_end + row / group;
            limits.start[column] = p.window > 0 ? limits.end[column] - p.window : 0;
        }
        const int last_row = min(tile * kTileRows + kTileRows, rows) - 1;
        const int unmasked_end = first_end + tile * kTileRows / group;
        const int unmasked_start = p.window > 0 ? first_end + last_row / group - p.window : 0;

        WarpState<C> state;
#pragma unroll
        for (int i = 0; i < C::kMmas; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) state.out[i][j] = 0.0f;
#pragma unroll
        for (int column = 0; column < 2; ++column) {
            state.max[column] = kMasked, state.sum[column] = 0.0f;
#pragma unroll
            for (int g = 0; g < C::kValueGroups; ++g) state.offset_sum[g][column] = 0.0f;
        }

        int slot = 0;
        for (int stage = stage_of(0); stage < work.last; stage += warps) {
            ring.wait(slot, parities >> slot & 1);
            parities ^= 1u << slot;
            const std::uint8_t* buffer = my_ring + slot * C::kStageBytes;
            const int base_token = stage * C::kStageTokens;
            if (base_token + C::kStageTokens <= unmasked_end && base_token >= unmasked_start) {
                attend_stage<C, false>(buffer, C::kBlocks, base_token, work.length, limits, query, query_sum,
                                       p.scale_log2, state, lane);
            } else {
                const int blocks = min(C::kBlocks, (work.length - base_token + kBlockTokens - 1) / kBlockTokens);
                attend_stage<C, true>(buffer, blocks, base_token, work.length, limits, query, query_sum, p.scale_log2,
                                      state, lane);
            }
            __syncwarp();  // everybody has read the slot
            if (issued % PageIds<C>::kBatch == 0) {
                ids = ids_next;
                ids_next = PageIds<C>::load(p, work, issued / PageIds<C>::kBatch + 1, warp, warps, lane);
            }
            issue_next(slot);
            slot = slot + 1 == stages ? 0 : slot + 1;
        }

#pragma unroll
        for (int column = 0; column < 2; ++column) {
#pragma unroll
            for (int distance = 4; distance <= 16; distance *= 2) {
                state.sum[column] += __shfl_xor_sync(kFullWarp, state.sum[column], distance);
#pragma unroll
                for (int g = 0; g < C::kValueGroups; ++g)
                    state.offset_sum[g][column] += __shfl_xor_sync(kFullWarp, state.offset_sum[g][column], distance);
            }
            if (lane < 4) max_sum[warp * kTileRows + 2 * lane + column] = {state.max[column], state.sum[column]};
        }
        auto* area = reinterpret_cast<float*>(my_ring);
        for_each_chunk<C::kD, plane_width(C::kValueBits)>([&](auto dims, auto base) {
            constexpr int kDims = decltype(dims)::value, kBase = decltype(base)::value;
            using Codes = ChunkCodes<C::kValueBits, kDims>;
            const auto step = [&](auto index) {
                constexpr int i = decltype(index)::value, kMma = kBase / 16 + i;
                constexpr int kGroup = kMma * 16 / C::kValueGroup;
                constexpr float kFactor =
                    C::kValueBits == 16 ? 1.0f : 16777216.0f / (1 << (Codes::kWidth * (i % Codes::kClasses)));
#pragma unroll
                for (int column = 0; column < 2; ++column) {
                    const float offset = C::kValueBits == 16 ? 0.0f : state.offset_sum[kGroup][column];
                    *reinterpret_cast<float2*>(area + (2 * (lane % 4) + column) * C::kRowStride + 16 * kMma +
                                               2 * (lane / 4)) = {
                        state.out[kMma][column] * kFactor + offset, state.out[kMma][2 + column] * kFactor + offset};
                }
            };
            for_each_index<kDims / 16>(step);
        });
        __syncthreads();
        merge_and_store<C>(p, work, shared, ring_bytes, max_sum, warps, &last_flag);
        if (item_index(k + 1) >= work.items) return;
        __syncthreads();  // the rings are free again
    }
}

}  // namespace quarot
