// Decode attention on the packed cache with tensor cores: the kernel. Its parts: attend_stage.cuh, load_stage.cuh,
// merge_parts.cuh, schedule.cuh (which CTA works on what).
//
// CTA = (split, kv head and tile of 8 query rows, sequence). Every warp fills its own ring (ring.cuh) with stages of
// `Blocks` blocks and keeps its own running softmax; then warps and splits are merged.
#pragma once

#include <cuda_runtime.h>

#include "attention/attend_stage.cuh"
#include "attention/load_stage.cuh"
#include "attention/merge_parts.cuh"
#include "attention/rotate_query.cuh"
#include "device/launch.cuh"

namespace quarot {

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
            while (issued < stages) issue_next(issued);  // as looked up before: what follows only confirms it
            load_my_query();
            const int ids_now = PageIds<C>::load(p, work, 0, warp, warps, lane);
            const bool same = p.batch == 1 && load_length(p, 0) == work.length;
            const Work now = same ? work : find_work(p, item_index(0), C::kStageTokens, lane);
            if (__any_sync(kFullWarp, !(now == work) || ids_now != ids)) {
                const int filled = max(0, min(issued, (work.last - stage_of(0) + warps - 1) / warps));
                for (int i = 0; i < filled; ++i) ring.wait_all(i, 0);
                parities = (1u << filled) - 1;
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
