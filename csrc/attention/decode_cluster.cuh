// Decode attention for few sequences, where not bandwidth but a chain of latencies is the bound: a column (sequence, kv head,
// tile of 8 query rows) is one cluster of CTAs, and is cut finer the shorter the sequence is.
//
// Against decode_kernel.cuh: no work list (every CTA knows its column), stages of 16, 32 or 64 tokens so that short
// sequences keep all warps busy, a merge through distributed shared memory instead of global memory, and short code: what
// runs once a launch is bound by the fetch of its instructions, which other kernels have thrown out of the cache.
#pragma once

#include <cuda_runtime.h>

#include "attention/attend_stage.cuh"
#include "attention/load_stage.cuh"
#include "attention/merge_cluster.cuh"
#include "device/cluster.cuh"
#include "device/launch.cuh"
#include "device/made_by_now.cuh"

namespace quarot {

// How a sequence is shared out among the warps of a cluster, by its length alone. Warp w of them has the stages
// first + w, first + w + workers ..
struct Share {
    Work work;
    int shift = 0;  // a stage is 2^shift blocks of 16 tokens

    template <typename C>
    __device__ __forceinline__ static Share of(const DecodeParams& p, int length, int workers) {
        Share share;
        const int first_block = first_stage(p, length, kBlockTokens);
        const int end = (length + kBlockTokens - 1) / kBlockTokens, blocks = end - first_block;
        while (share.shift < C::kBlocksLog2 && workers << share.shift < blocks) ++share.shift;
        share.work.sequence = blockIdx.z, share.work.column = blockIdx.y, share.work.length = length;
        share.work.first = first_block >> share.shift;
        share.work.last = (end + (1 << share.shift) - 1) >> share.shift;
        return share;
    }
};

// Grid: x = CTAs of a cluster, y = kv head * tiles + tile, z = sequence. Empty where there are no clusters.
template <typename C>
__global__ void __launch_bounds__(kClusterThreads, 3) cluster_decode_kernel(const __grid_constant__ DecodeParams p) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) std::uint8_t shared[];
    const int rank = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const int worker = warp * p.cluster + rank, workers = warps * p.cluster;  // neighbouring stages go to different CTAs
    int length = load_length(p, blockIdx.z);
    const int stages = p.ring_stages, ring_bytes = stages * C::kStageBytes;
    const Slice<C> slice(p);
    auto* area = reinterpret_cast<float*>(shared + warps * ring_bytes);
    auto* max_sum = reinterpret_cast<float2*>(area + workers * slice.part_floats);
    auto* mbarriers = reinterpret_cast<std::uint64_t*>(max_sum + workers * kTileRows);
    auto* rotated = reinterpret_cast<std::uint16_t*>(mbarriers + warps * stages + 1);
    const std::uint32_t received = shared_address(mbarriers + warps * stages);
    if (threadIdx.x == 0) {
        init_mbarrier(received);
        fence_mbarrier_init();
    }
    cluster_arrive_relaxed();
    std::uint8_t* my_ring = shared + warp * ring_bytes;
    const Ring ring(my_ring, mbarriers + warp * stages, stages, C::kStageBytes, lane);
    unsigned parities = 0;  // bit = parity the next wait on that slot looks for

    const int kv_head = kv_head_of(p, blockIdx.y), tile = tile_of(p, blockIdx.y), rows = p.tokens * p.group;
    Share share = Share::of<C>(p, length, workers);
    int ids = load_page_ids(p, share.work, share.shift, 0, worker, workers, lane);
    int issued = 0;
    const auto stage_of = [&](int i) { return share.work.first + worker + i * workers; };
    const auto issue_next = [&](int slot) {
        if (stage_of(issued) < share.work.last)
            issue_stage<C>(p, share.work, ring, stage_of(issued), issued, share.shift, slot, ids, kv_head, lane);
        ring.commit();
        ++issued;
    };
    const auto query_source = [&](int row) -> const void* {
        return static_cast<const std::uint8_t*>(p.query) +
               output_row(p, blockIdx.z, kv_head, row) * C::kD * (p.dtype == DType::kFloat32 ? 4 : 2);
    };

    const int query_row = tile * kTileRows + lane / 4;
    const void* my_query = query_source(query_row);
    made_by_now(my_query);
    // Before the wait as in decode_kernel.cuh: whole stages of old tokens, the next one into L2 only.
#pragma unroll 1
    while (issued < stages && stage_of(issued) < share.work.last &&
           (stage_of(issued) + 1) << share.shift <= (length - p.tokens) / kBlockTokens)
        issue_next(issued);
    if (stage_of(issued) < share.work.last)
        issue_stage<C, true>(p, share.work, ring, stage_of(issued), issued, share.shift, 0, ids, kv_head, lane);
    pdl_wait();
    pdl_trigger();
    std::uint32_t query[C::kMmas][2]{};
    if (p.rotate_order == 0) {
        // One decision for all loads: 16-bit types are loaded alike.
        if (p.dtype == DType::kFloat32)
            load_query<C>(my_query, DType::kFloat32, query_row < rows, query, lane);
        else
            load_query<C>(my_query, DType::kFloat16, query_row < rows, query, lane);
    }
#pragma unroll 1
    while (issued < stages) issue_next(issued);  // as looked up before: what follows only confirms it
    const int length_now = load_length(p, blockIdx.z);
    const int ids_now = load_page_ids(p, share.work, share.shift, 0, worker, workers, lane);
    if (__any_sync(kFullWarp, length_now != length || ids_now != ids)) {
#pragma unroll 1
        for (int i = 0; i < stages; ++i) {
            if (stage_of(i) >= share.work.last) break;
            ring.wait_all(i, 0);
            parities |= 1u << i;
        }
        length = length_now, issued = 0;
        share = Share::of<C>(p, length, workers);
        ids = load_page_ids(p, share.work, share.shift, 0, worker, workers, lane);
#pragma unroll 1
        while (issued < stages) issue_next(issued);
    }

    float query_sum[C::kKeyGroups][2];
    make_query<C>(p, query_source, tile, rows, rotated, query, query_sum, warp, warps, lane);
    const RowLimits limits(p, length, tile, rows, lane);
    WarpState<C> state;
    state.clear();
    int slot = 0;
    for (int stage = stage_of(0); stage < share.work.last; stage += workers) {
        ring.wait(slot, parities >> slot & 1);
        parities ^= 1u << slot;
        const std::uint8_t* buffer = my_ring + slot * C::kStageBytes;
        const int token = (stage << share.shift) * kBlockTokens;
        const int blocks = min(1 << share.shift, (length - token + kBlockTokens - 1) / kBlockTokens);
#pragma unroll 1
        for (int i = 0; i < blocks; ++i)
            attend_stage<C, true, 1>(buffer + i * C::kBlockBytes, 1, token + i * kBlockTokens, length, limits, query,
                                     query_sum, p.scale_log2, state, lane);
        __syncwarp();  // everybody has read the slot
        if (stage_of(issued) < share.work.last) {
            const int batch = issued >> (5 - share.shift);  // of stages whose page ids a warp holds
            if (issued == batch << (5 - share.shift))
                ids = load_page_ids(p, share.work, share.shift, batch, worker, workers, lane);
            issue_next(slot);
        }
        slot = slot + 1 == stages ? 0 : slot + 1;
    }

    const int tile_rows = min(kTileRows, rows - tile * kTileRows);
    const int arriving = min(share.work.last - share.work.first, workers);
    if (threadIdx.x == 0) expect_remote(received, slice.bytes(arriving, tile_rows));
    cluster_wait();  // all CTAs of the cluster have started: their shared memory may be written
    if (stage_of(0) < share.work.last) {
        state.add_lanes();
        send_part<C>(state, area, max_sum, received, slice, p.cluster, worker, tile_rows, lane);
    }
    wait_remote(received);
    merge_slice<C>(p, share.work, area, max_sum, slice, arriving, rank, tile_rows);
#endif
}

}  // namespace quarot
