// Which sequence, head and stages a CTA works on, decided on the device from the lengths (no host plan).
//
// Every sequence is cut into `splits` pieces, every piece times every (kv head, row tile) is one work item of a flat list,
// and the CTAs of a grid that fits the device take the items in turn. So there are no idle CTAs to launch and retire (they
// cost 2-5 us each while an SM holds one large CTA), and lengths that differ need no host knowledge.
//
// Each warp finds its item by itself from `lengths`: a few loads, reductions and scans over lanes.
#pragma once

#include "attention/decode_params.h"

namespace quarot {

constexpr int kSortLimit = 128;  // sequences; larger batches are taken in order
constexpr int kMinStages = 4;    // of a piece: a smaller one is dominated by the fixed cost of a CTA
constexpr int kBuckets = 8;
constexpr unsigned kFullWarp = 0xffffffffu;

struct Work {
    int sequence = -1;  // -1: no such item
    int length = 0;     // tokens in the cache
    int column = 0;     // kv head * tiles + tile
    int split = 0, splits = 1;
    int first = 0, last = 0;  // stages
    int base = 0;             // item of split 0, column 0: split s of this column is item base + s * columns + column
    int items = 0;            // length of the list

    __device__ __forceinline__ bool operator==(const Work& other) const {
        return sequence == other.sequence && length == other.length && column == other.column &&
               split == other.split && splits == other.splits && base == other.base && items == other.items;
    }
};

// Kv head and row tile of a column. Divisions cost some 30 instructions each, and at batch 1 instructions that run once
// are what the time goes into (NOTES.md), so the common cases go without.
__device__ __forceinline__ int kv_head_of(const DecodeParams& p, int column) {
    return p.tiles == 1 ? column : column / p.tiles;
}
__device__ __forceinline__ int tile_of(const DecodeParams& p, int column) {
    return p.tiles == 1 ? 0 : column % p.tiles;
}

// Volatile: read again after the programmatic-launch wait, must not come from L1.
__device__ __forceinline__ int load_length(const DecodeParams& p, int row) {
    const int length = *reinterpret_cast<const volatile int*>(p.lengths + row);
    return min(max(length, 0), p.max_pages * p.page_blocks * 16);
}

// What a warp has seen of the lengths, to tell whether the list of work still holds: one trip to memory, where find_work
// takes two and some 150 instructions. Of larger batches it cannot tell.
struct SeenLengths {
    static constexpr int kMost = 64;
    int first, second;  // of rows lane and lane + 32

    __device__ __forceinline__ SeenLengths(const DecodeParams& p, int lane)
        : first(lane < p.batch ? load_length(p, lane) : 0), second(lane + 32 < p.batch ? load_length(p, lane + 32) : 0) {}

    __device__ __forceinline__ bool still_hold(const DecodeParams& p, int lane) const {
        if (p.batch > kMost) return false;
        const SeenLengths now(p, lane);
        return __all_sync(kFullWarp, now.first == first && now.second == second);
    }
};

__device__ __forceinline__ int first_stage(const DecodeParams& p, int length, int stage_tokens) {
    return p.window > 0 ? max(0, length - p.tokens + 1 - p.window) / stage_tokens : 0;
}

__device__ __forceinline__ int stage_count(const DecodeParams& p, int length, int stage_tokens) {
    return (length + stage_tokens - 1) / stage_tokens - first_stage(p, length, stage_tokens);
}

// Pieces of a sequence of `stages`: never smaller than `piece`, never more than the merge can add up quickly.
__device__ __forceinline__ int split_count(const DecodeParams& p, int stages, float piece) {
    const int wanted = static_cast<int>(__fdividef(static_cast<float>(stages) + 0.01f, piece));
    return min(max(wanted, 1), p.max_splits);
}

// Item `index` of the list, the same for all lanes. Inlined at every call: as a function it cost 4 us at (16, 8k).
__device__ __forceinline__ Work find_work(const DecodeParams& p, int index, int stage_tokens, int lane) {
    const int columns = p.kv_heads * p.tiles;
    Work work;
    int longest = 0, shortest = 0x7fffffff, total = 0, row = -1, local = index;
    for (int r = lane; r < p.batch; r += 32) {
        const int length = load_length(p, r);
        total += stage_count(p, length, stage_tokens);
        longest = max(longest, length), shortest = min(shortest, length);
    }
    if (p.batch > 1) {
        total = __reduce_add_sync(kFullWarp, total);
        longest = __reduce_max_sync(kFullWarp, longest), shortest = __reduce_min_sync(kFullWarp, shortest);
    } else {
        total = __shfl_sync(kFullWarp, total, 0), longest = shortest = __shfl_sync(kFullWarp, longest, 0);
    }
    const float share = static_cast<float>(total) * columns / p.cta_slots;
    if (longest - shortest < stage_tokens) {
        // As many pieces as fit the device at once: a second wave costs more than the finer cut brings.
        const int stages = stage_count(p, longest, stage_tokens);
        work.splits = split_count(p, stages, fmaxf(share, static_cast<float>(kMinStages)));
        const int items = work.splits * columns;
        work.items = items * p.batch;
        row = index / items;
        if (row >= p.batch) return work;
        local = index - row * items;
        work.base = row * items;
        work.length = p.batch == 1 ? longest : load_length(p, row);
    } else {
        // Mixed lengths: smaller pieces, largest first (by powers of two), so that the last ones even out the CTAs.
        const float piece = fmaxf(p.mixed_piece * share, static_cast<float>(kMinStages));
        const bool sorted = p.batch <= kSortLimit;
        int pieces = 0;
        for (int r = lane; r < p.batch; r += 32)
            pieces += split_count(p, stage_count(p, load_length(p, r), stage_tokens), piece);
        work.items = __reduce_add_sync(kFullWarp, pieces) * columns;
        if (index >= work.items) return work;
        int before = 0;
        for (int bucket = 0; bucket < (sorted ? kBuckets : 1) && row < 0; ++bucket) {
            for (int start = 0; start < p.batch; start += 32) {
                const int r = start + lane;
                const int length = r < p.batch ? load_length(p, r) : 0;
                const int stages = stage_count(p, length, stage_tokens);
                const int splits = split_count(p, stages, piece);
                // Bucket 0: whole pieces; then under 1, 1/2, 1/4 .. of a piece.
                const int rank = min(max(static_cast<int>(ceilf(__log2f(piece / fmaxf(stages, 0.1f)))), 0), kBuckets - 1);
                const bool here = r < p.batch && (!sorted || rank == bucket);
                const int count = here ? splits * columns : 0;
                int sum = count;  // inclusive scan
#pragma unroll
                for (int distance = 1; distance < 32; distance *= 2) {
                    const int other = __shfl_up_sync(kFullWarp, sum, distance);
                    if (lane >= distance) sum += other;
                }
                const int end = before + sum;
                const unsigned found = __ballot_sync(kFullWarp, here && index >= end - count && index < end);
                if (found) {
                    const int source = __ffs(found) - 1;
                    row = start + source;
                    work.base = __shfl_sync(kFullWarp, end - count, source);
                    work.length = __shfl_sync(kFullWarp, length, source);
                    work.splits = __shfl_sync(kFullWarp, splits, source);
                    local = index - work.base;
                    break;
                }
                before = __shfl_sync(kFullWarp, end, 31);
            }
        }
        if (row < 0) return work;
    }
    work.sequence = row;
    work.split = local / columns;
    work.column = local - work.split * columns;
    const int first = first_stage(p, work.length, stage_tokens);
    const int stages = stage_count(p, work.length, stage_tokens);
    work.first = first + stages * work.split / work.splits;
    work.last = first + stages * (work.split + 1) / work.splits;
    return work;
}

// The k-th item of a CTA: forwards, then backwards, so that whoever had a large piece gets a small one next.
__device__ __forceinline__ int item_index(int k) {
    return k * gridDim.x + (k % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

}  // namespace quarot
