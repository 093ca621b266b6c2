// Which sequence and which of its stages a CTA works on, decided on the device from the lengths (no host plan).
//
// Every warp of every CTA computes the same from `lengths`: a split count per sequence that makes the CTA total fit the
// slots of the device, and, when lengths differ, the sequences longest first, so that the last wave is made of short ones.
#pragma once

#include "attention/decode_params.h"

namespace quarot {

constexpr int kSortLimit = 128;   // sequences; beyond it they are taken in order
constexpr int kMinStages = 4;     // per split: fewer are dominated by the fixed cost of a CTA
constexpr unsigned kFullWarp = 0xffffffffu;

struct Work {
    int sequence;
    int length;      // tokens in the cache
    int splits;      // CTAs that share the sequence (0: nothing to do)
    int first, last; // stages [first, last) of this CTA

    __device__ __forceinline__ bool operator==(const Work& other) const {
        return sequence == other.sequence && length == other.length && splits == other.splits && first == other.first &&
               last == other.last;
    }
};

// Volatile: read again after the programmatic-launch wait, must not come from L1.
__device__ __forceinline__ int load_length(const DecodeParams& p, int row) {
    const int length = *reinterpret_cast<const volatile int*>(p.lengths + row);
    return min(max(length, 0), p.max_pages * p.page_blocks * 16);
}

__device__ __forceinline__ int first_stage(const DecodeParams& p, int length, int stage_tokens) {
    return p.window > 0 ? max(0, length - p.tokens + 1 - p.window) / stage_tokens : 0;
}

__device__ __forceinline__ int stage_count(const DecodeParams& p, int length, int stage_tokens) {
    return (length + stage_tokens - 1) / stage_tokens - first_stage(p, length, stage_tokens);
}

// Stages of row `z` of the grid and share `split` of it. All lanes of the warp return the same.
__device__ __forceinline__ Work plan_work(const DecodeParams& p, int z, int split, int stage_tokens, int lane) {
    Work work;
    work.sequence = z;
    int total = 0;
    bool uniform = true;
    if (p.batch > 1) {
        int longest = 0, shortest = 0x7fffffff;
        for (int row = lane; row < p.batch; row += 32) {
            const int length = load_length(p, row);
            total += stage_count(p, length, stage_tokens);
            longest = max(longest, length), shortest = min(shortest, length);
        }
        total = __reduce_add_sync(kFullWarp, total);
        longest = __reduce_max_sync(kFullWarp, longest), shortest = __reduce_min_sync(kFullWarp, shortest);
        uniform = longest - shortest < stage_tokens;
        if (!uniform && p.batch <= kSortLimit) {
            // The z-th longest: the row with exactly z rows before it.
            for (int base = 0; base < p.batch; base += 32) {
                const int row = base + lane;
                const int mine = row < p.batch ? load_length(p, row) : -1;
                int rank = 0;
                for (int other_base = 0; other_base < p.batch; other_base += 32) {
                    const int other_row = other_base + lane;
                    const int other = other_row < p.batch ? load_length(p, other_row) : -2;
                    const int count = min(32, p.batch - other_base);
                    for (int i = 0; i < count; ++i) {
                        const int length = __shfl_sync(kFullWarp, other, i);
                        rank += length > mine || (length == mine && other_base + i < row);
                    }
                }
                const unsigned found = __ballot_sync(kFullWarp, row < p.batch && rank == z);
                if (found) work.sequence = base + __ffs(found) - 1;
            }
        }
    }
    work.length = load_length(p, work.sequence);
    const int stages = stage_count(p, work.length, stage_tokens);
    if (p.batch == 1) total = stages;
    const int items = p.kv_heads * p.tiles;
    // Uniform lengths: the most splits that still fit the device at once (a second wave costs more than it brings).
    // Mixed lengths: pieces of half the even share, since short sequences fill the gaps.
    const float share = fmaxf(static_cast<float>(total) * items / p.cta_slots, 1.0f);
    const float piece = fmaxf(uniform ? share : 0.5f * share, static_cast<float>(kMinStages));
    const int wanted = static_cast<int>(__fdividef(static_cast<float>(stages), piece) + (uniform ? 1e-3f : 0.5f));
    work.splits = stages == 0 ? 0 : min(max(wanted, 1), p.max_splits);
    const int first = first_stage(p, work.length, stage_tokens);
    if (split < work.splits) {
        work.first = first + stages * split / work.splits;
        work.last = first + stages * (split + 1) / work.splits;
    } else {
        work.first = work.last = 0;
    }
    return work;
}

}  // namespace quarot
