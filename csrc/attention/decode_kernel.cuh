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

// q of the tile as mma operands: lane holds row lane / 4, dims 16 i + 4 (lane % 4) .. + 3 as pairs (0, 2) and (1, 3).
template <typename C>
__device__ __forceinline__ void load_query(const void* row, DType dtype, bool valid,
                                           std::uint32_t (&query)[C::kMmas][2], float (&sums)[C::kKeyGroups], int lane) {
#pragma unroll
    for (int group = 0; group < C::kKeyGroups; ++group) sums[group] = 0.0f;
#pragma unroll
    for (int i = 0; i < C::kMmas; ++i) {
        const int dim = 16 * i + 4 * (lane % 4);
        std::uint32_t even = 0, odd = 0;  // dims (0, 2) and (1, 3)
        if (valid) {
            if (dtype == DType::kFloat32) {
                const float4 x = *reinterpret_cast<const float4*>(static_cast<const float*>(row) + dim);
                even = pack_pair<C::kBf16>(x.x, x.z), odd = pack_pair<C::kBf16>(x.y, x.w);
            } else {
                const uint2 x = *reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(row) + dim);
                even = __byte_perm(x.x, x.y, 0x5410), odd = __byte_perm(x.x, x.y, 0x7632);
                if (dtype == DType::kBFloat16 && !C::kBf16) {
                    even = pack_pair<false>(__uint_as_float(even << 16), __uint_as_float(even & 0xffff0000u));
                    odd = pack_pair<false>(__uint_as_float(odd << 16), __uint_as_float(odd & 0xffff0000u));
                }
            }
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

template <typename C>
__device__ __forceinline__ void issue_stage(const DecodeParams& p, const Work& work, const Ring& ring, int stage,
                                            int slot, int ids, int ids_lane, int kv_head, int lane) {
    const int first_block = stage * C::kBlocks;
    const int count = min(C::kBlocks, (work.length + kBlockTokens - 1) / kBlockTokens - first_block);
    const auto source = [&](int id, int block) {
        const std::int64_t index = (static_cast<std::int64_t>(id) * p.kv_heads + kv_head) * p.page_blocks;
        return p.pool + (index + block % p.page_blocks) * C::kBlockBytes;
    };
    ring.expect(slot, count * C::kBlockBytes, lane);
    if (p.page_blocks % C::kBlocks == 0) {  // a stage lies within one page: one copy
        const int id = __shfl_sync(kFullWarp, ids, ids_lane);
        if (!QUAROT_BULK_COPY || lane == 0) ring.copy(slot, 0, source(id, first_block), count * C::kBlockBytes, lane);
    } else if (QUAROT_BULK_COPY) {
        const int id = __shfl_sync(kFullWarp, ids, ids_lane + lane % C::kBlocks);
        __syncwarp();  // the expectation first
        if (lane < count)
            ring.copy(slot, lane * C::kBlockBytes, source(id, first_block + lane), C::kBlockBytes, lane);
    } else {
        for (int block = 0; block < count; ++block) {
            const int id = __shfl_sync(kFullWarp, ids, ids_lane + block);
            ring.copy(slot, block * C::kBlockBytes, source(id, first_block + block), C::kBlockBytes, lane);
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

// Adds the warps' results (row-wise maxima, sums and outputs in shared memory), then the splits'; writes out and lse.
template <typename C>
__device__ __forceinline__ void merge_and_store(const DecodeParams& p, const Work& work, int split, int kv_head,
                                                int tile, const std::uint8_t* rings, int ring_bytes,
                                                const float2* max_sum, int warps, int* last_flag) {
    constexpr int kQuads = C::kD / 4;
    const int rows = min(kTileRows, p.tokens * (p.query_heads / p.kv_heads) - tile * kTileRows);
    const std::int64_t item =
        static_cast<std::int64_t>(work.sequence) * (p.kv_heads * p.tiles) + kv_head * p.tiles + tile;
    for (int index = threadIdx.x; index < rows * kQuads; index += blockDim.x) {
        const int row = index / kQuads, quad = index % kQuads;
        float peak = kMasked, sum = 0.0f;
        float4 total{0.0f, 0.0f, 0.0f, 0.0f};
        for (int w = 0; w < warps; ++w) peak = fmaxf(peak, max_sum[w * kTileRows + row].x);
        for (int w = 0; w < warps; ++w) {
            const float2 ms = max_sum[w * kTileRows + row];
            const float factor = exp2_approx(ms.x - peak);
            const float4 x = *reinterpret_cast<const float4*>(
                reinterpret_cast<const float*>(rings + w * ring_bytes) + row * C::kRowStride + 4 * quad);
            sum += factor * ms.y;
            total.x += factor * x.x, total.y += factor * x.y, total.z += factor * x.z, total.w += factor * x.w;
        }
        if (work.splits == 1) {
            const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
            const std::int64_t target = output_row(p, work.sequence, kv_head, tile * kTileRows + row);
            store_four<C>(p, target * kQuads + quad,
                          {total.x * inverse, total.y * inverse, total.z * inverse, total.w * inverse});
            if (quad == 0) p.lse[target] = finish_lse(peak, sum, C::kProbabilityBias);
        } else {
            const std::int64_t slot = (item * p.max_splits + split) * kTileRows + row;
            __stcg(reinterpret_cast<float4*>(p.partial) + slot * kQuads + quad, total);
            if (quad == 0) __stcg(reinterpret_cast<float2*>(p.partial_max_sum) + slot, float2{peak, sum});
        }
    }
    if (work.splits == 1) return;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) *last_flag = atomicAdd(p.counters + item, 1) == work.splits - 1;
    __syncthreads();
    if (!*last_flag) return;
    if (threadIdx.x == 0) p.counters[item] = 0;  // ready for the next launch
    __threadfence();
    for (int index = threadIdx.x; index < rows * kQuads; index += blockDim.x) {
        const int row = index / kQuads, quad = index % kQuads;
        const std::int64_t slot = item * p.max_splits * kTileRows + row;
        const float2* splits_max_sum = reinterpret_cast<const float2*>(p.partial_max_sum) + slot;
        const float4* splits_total = reinterpret_cast<const float4*>(p.partial) + slot * kQuads + quad;
        float peak = kMasked, sum = 0.0f;
        float4 total{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
        for (int s = 0; s < work.splits; ++s) peak = fmaxf(peak, __ldcg(&splits_max_sum[s * kTileRows]).x);
#pragma unroll 4
        for (int s = 0; s < work.splits; ++s) {
            const float2 ms = __ldcg(&splits_max_sum[s * kTileRows]);
            const float4 x = __ldcg(&splits_total[s * kTileRows * kQuads]);
            const float factor = exp2_approx(ms.x - peak);
            sum += factor * ms.y;
            total.x += factor * x.x, total.y += factor * x.y, total.z += factor * x.z, total.w += factor * x.w;
        }
        const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
        const std::int64_t target = output_row(p, work.sequence, kv_head, tile * kTileRows + row);
        store_four<C>(p, target * kQuads + quad,
                      {total.x * inverse, total.y * inverse, total.z * inverse, total.w * inverse});
        if (quad == 0) p.lse[target] = finish_lse(peak, sum, C::kProbabilityBias);
    }
}

// Bytes of dynamic shared memory: rings | mbarriers | (max, sum) of the warps | rotated queries.
template <typename C>
constexpr int decode_shared_bytes(int warps, int stages, bool rotate) {
    return warps * (stages * (C::kStageBytes + 8) + kTileRows * 8) + (rotate ? kTileRows * C::kD * 2 : 0);
}

template <typename C>
__global__ void __launch_bounds__(256, 1) decode_kernel(const __grid_constant__ DecodeParams p) {
    extern __shared__ __align__(128) std::uint8_t shared[];
    __shared__ int last_flag;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int split = blockIdx.x, kv_head = blockIdx.y / p.tiles, tile = blockIdx.y % p.tiles;
    const int group = p.query_heads / p.kv_heads, stages = p.ring_stages, ring_bytes = stages * C::kStageBytes;
    auto* mbarriers = reinterpret_cast<std::uint64_t*>(shared + warps * ring_bytes);
    auto* max_sum = reinterpret_cast<float2*>(mbarriers + warps * stages);
    auto* rotated = reinterpret_cast<std::uint16_t*>(max_sum + warps * kTileRows);
    std::uint8_t* my_ring = shared + warp * ring_bytes;
    const Ring ring(my_ring, mbarriers + warp * stages, stages, C::kStageBytes, lane);

    // Before the programmatic-launch wait only what the previous kernel cannot be writing is fetched: whole stages of
    // tokens older than the T new ones. Lengths and page ids are read again after the wait and the ring restarted in the
    // unlikely case that they changed, so a producer of them may run right before.
    Work work = plan_work(p, blockIdx.z, split, C::kStageTokens, lane);
    int ids = PageIds<C>::load(p, work, 0, warp, warps, lane);
    int issued = 0;
    const auto issue_next = [&](int slot) {
        const int stage = work.first + warp + issued * warps;
        if (stage < work.last)
            issue_stage<C>(p, work, ring, stage, slot, ids, issued % PageIds<C>::kBatch * C::kBlocks, kv_head, lane);
        ring.commit();
        ++issued;
    };
    const auto is_old = [&](int k) {
        const int stage = work.first + warp + k * warps;
        return stage < work.last && (stage + 1) * C::kStageTokens <= work.length - p.tokens;
    };
    while (issued < stages && is_old(issued)) issue_next(issued);
    pdl_wait();
    pdl_trigger();
    unsigned parities = 0;  // bit = parity the next wait on that slot looks for
    {
        const int ids_now = PageIds<C>::load(p, work, 0, warp, warps, lane);
        const Work now = plan_work(p, blockIdx.z, split, C::kStageTokens, lane);
        if (__any_sync(kFullWarp, !(now == work) || ids_now != ids)) {
            for (int k = 0; k < issued; ++k) {
                ring.wait_all(k, 0);
                parities |= 1u << k;
            }
            issued = 0;
            work = now;
            ids = PageIds<C>::load(p, work, 0, warp, warps, lane);
        }
    }
    int ids_next = PageIds<C>::load(p, work, 1, warp, warps, lane);
    while (issued < stages) issue_next(issued);

    const int rows = p.tokens * group;
    if (work.splits == 0) {  // empty sequence
        if (split != 0) return;
        for (int index = threadIdx.x; index < min(kTileRows, rows - tile * kTileRows) * (C::kD / 4);
             index += blockDim.x) {
            const std::int64_t target =
                output_row(p, work.sequence, kv_head, tile * kTileRows + index / (C::kD / 4));
            store_four<C>(p, target * (C::kD / 4) + index % (C::kD / 4), {0.0f, 0.0f, 0.0f, 0.0f});
            if (index % (C::kD / 4) == 0) p.lse[target] = -CUDART_INF_F;
        }
        return;
    }
    if (split >= work.splits) return;

    std::uint32_t query[C::kMmas][2];
    float query_sum[C::kKeyGroups][2];
    {
        const std::size_t element = p.dtype == DType::kFloat32 ? 4 : 2;
        const auto source = [&](int row) {
            return static_cast<const std::uint8_t*>(p.query) +
                   output_row(p, work.sequence, kv_head, row) * C::kD * element;
        };
        const int row = tile * kTileRows + lane / 4;
        float sums[C::kKeyGroups];
        if (p.rotate_order != 0) {
            if constexpr ((C::kD & (C::kD - 1)) == 0) {
                constexpr int kPer = C::kD / 32;
                for (int r = warp; r < kTileRows; r += warps) {
                    float x[kPer];
#pragma unroll
                    for (int i = 0; i < kPer; ++i)
                        x[i] = tile * kTileRows + r < rows
                                   ? load_as_float(source(tile * kTileRows + r), p.dtype, kPer * lane + i)
                                   : 0.0f;
                    rotate_registers<C::kD>(x, lane);
#pragma unroll
                    for (int i = 0; i < kPer; i += 2)
                        reinterpret_cast<std::uint32_t*>(rotated)[(r * C::kD + kPer * lane + i) / 2] =
                            pack_pair<C::kBf16>(x[i], x[i + 1]);
                }
            }
            __syncthreads();
            load_query<C>(rotated + lane / 4 * C::kD, C::kBf16 ? DType::kBFloat16 : DType::kFloat16, true, query, sums,
                          lane);
        } else {
            load_query<C>(source(row), p.dtype, row < rows, query, sums, lane);
        }
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
    for (int stage = work.first + warp; stage < work.last; stage += warps) {
        ring.wait(slot, parities >> slot & 1);
        parities ^= 1u << slot;
        const std::uint8_t* buffer = my_ring + slot * C::kStageBytes;
        const int base_token = stage * C::kStageTokens;
        if (base_token + C::kStageTokens <= unmasked_end && base_token >= unmasked_start) {
            attend_stage<C, false>(buffer, C::kBlocks, base_token, work.length, limits, query, query_sum, p.scale_log2,
                                   state, lane);
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
    merge_and_store<C>(p, work, split, kv_head, tile, shared, ring_bytes, max_sum, warps, &last_flag);
}

}  // namespace quarot
