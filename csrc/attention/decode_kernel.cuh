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
    const int rows = p.tokens * p.group;
    const int stages = p.ring_stages, ring_bytes = stages * C::kStageBytes;
    auto* mbarriers = reinterpret_cast<std::uint64_t*>(shared + warps * ring_bytes);
    auto* max_sum = reinterpret_cast<float2*>(mbarriers + warps * stages);
    auto* rotated = reinterpret_cast<std::uint16_t*>(max_sum + warps * kTileRows);
    std::uint8_t* my_ring = shared + warp * ring_bytes;
    const Ring ring(my_ring, mbarriers + warp * stages, stages, C::kStageBytes, lane);
    constexpr int kIdStages = 32 >> C::kBlocksLog2;  // whose page ids a warp holds
    unsigned parities = 0;  // bit = parity the next wait on that slot looks for
    const SeenLengths seen(p, lane);

    for (int k = 0;; ++k) {
        Work work = find_work(p, item_index(k), C::kStageTokens, lane);
        int ids = load_page_ids(p, work, C::kBlocksLog2, 0, warp, warps, lane);
        int issued = 0;
        const auto stage_of = [&](int i) { return work.first + warp + i * warps; };
        const auto issue_next = [&](int slot) {
            if (stage_of(issued) < work.last)
                issue_stage<C>(p, work, ring, stage_of(issued), issued, C::kBlocksLog2, slot, ids,
                               kv_head_of(p, work.column), lane);
            ring.commit();
            ++issued;
        };
        const auto query_source = [&](int row) -> const void* {
            return static_cast<const std::uint8_t*>(p.query) +
                   output_row(p, work.sequence, kv_head_of(p, work.column), row) * C::kD *
                       (p.dtype == DType::kFloat32 ? 4 : 2);
        };
        std::uint32_t query[C::kMmas][2];
        const auto load_my_query = [&] {
            const int row = tile_of(p, work.column) * kTileRows + lane / 4;
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
                issue_stage<C, true>(p, work, ring, stage_of(issued), issued, C::kBlocksLog2, 0, ids,
                                     kv_head_of(p, work.column), lane);
            pdl_wait();
            pdl_trigger();
            while (issued < stages) issue_next(issued);  // as looked up before: what follows only confirms it
            load_my_query();
            const int ids_now = load_page_ids(p, work, C::kBlocksLog2, 0, warp, warps, lane);
            const Work now = seen.still_hold(p, lane) ? work : find_work(p, item_index(0), C::kStageTokens, lane);
            if (__any_sync(kFullWarp, !(now == work) || ids_now != ids)) {
                const int filled = max(0, min(issued, (work.last - stage_of(0) + warps - 1) / warps));
                for (int i = 0; i < filled; ++i) ring.wait_all(i, 0);
                parities = (1u << filled) - 1;
                issued = 0;
                work = now;
                ids = load_page_ids(p, work, C::kBlocksLog2, 0, warp, warps, lane);
                load_my_query();
            }
        } else {
            load_my_query();
        }
        if (work.sequence < 0) return;
        while (issued < stages) issue_next(issued);
        int ids_next = load_page_ids(p, work, C::kBlocksLog2, 1, warp, warps, lane);
        const int tile = tile_of(p, work.column);

        float query_sum[C::kKeyGroups][2];
        make_query<C>(p, query_source, tile, rows, rotated, query, query_sum, warp, warps, lane);
        const RowLimits limits(p, work.length, tile, rows, lane);
        WarpState<C> state;
        state.clear();
        int slot = 0;
        for (int stage = stage_of(0); stage < work.last; stage += warps) {
            ring.wait(slot, parities >> slot & 1);
            parities ^= 1u << slot;
            const std::uint8_t* buffer = my_ring + slot * C::kStageBytes;
            const int base_token = stage * C::kStageTokens;
            if (!p.always_masks && limits.all_see(base_token, C::kStageTokens)) {
                attend_stage<C, false>(buffer, C::kBlocks, base_token, work.length, limits, query, query_sum,
                                       p.scale_log2, state, lane);
            } else {
                const int blocks = min(C::kBlocks, (work.length - base_token + kBlockTokens - 1) / kBlockTokens);
                attend_stage<C, true>(buffer, blocks, base_token, work.length, limits, query, query_sum, p.scale_log2,
                                      state, lane);
            }
            __syncwarp();  // everybody has read the slot
            if (issued % kIdStages == 0) {
                ids = ids_next;
                ids_next = load_page_ids(p, work, C::kBlocksLog2, issued / kIdStages + 1, warp, warps, lane);
            }
            issue_next(slot);
            slot = slot + 1 == stages ? 0 : slot + 1;
        }

        state.add_lanes();
#pragma unroll
        for (int column = 0; column < 2; ++column)
            if (lane < 4) max_sum[warp * kTileRows + 2 * lane + column] = {state.max[column], state.sum[column]};
        auto* area = reinterpret_cast<float*>(my_ring);
        state.for_each_output([&](int mma, int column, float2 x) {
            *reinterpret_cast<float2*>(area + (2 * (lane % 4) + column) * C::kRowStride + 16 * mma + 2 * (lane / 4)) = x;
        });
        __syncthreads();
        merge_and_store<C>(p, work, shared, ring_bytes, max_sum, warps, &last_flag);
        if (item_index(k + 1) >= work.items) return;
        __syncthreads();  // the rings are free again
    }
}

}  // namespace quarot
