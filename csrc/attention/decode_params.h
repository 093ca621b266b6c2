// Arguments of decode attention, shared by the tensor-core kernels, the generic kernel and the launcher.
#pragma once

#include <cstdint>

#include "device/dtype.h"

namespace quarot {

constexpr int kClusterThreads = 128;  // of a CTA of decode_cluster.cuh at most: several CTAs an SM, registers for all

// Notation: B sequences, T new tokens each, Hq query heads, Hk kv heads, D head_dim, R = T * Hq/Hk query rows of a kv head.
struct DecodeParams {
    const void* query;          // [B, T, Hq, D] of dtype
    const std::uint8_t* pool;   // [num_pages, Hk, page_blocks, block_bytes]
    const int* page_table;      // [B, max_pages], row stride max_pages
    const int* lengths;         // [B], the T new tokens included
    void* out;                  // [B, T, Hq, D] of dtype
    float* lse;                 // [B, T, Hq], base 2
    float* partial;             // [work items, 8, D] fp32, unnormalised outputs of the pieces of a split sequence
    float* partial_max_sum;     // [items, 8, 2]
    int* counters;              // [items], zero before and after every launch
    const std::int8_t* rotation_signs;  // [order, order] of R3, null for order 1
    DType dtype;
    int batch, tokens, query_heads, kv_heads;
    int group;       // Hq / Hk
    int page_shift;  // log2 of page_blocks, or -1
    int num_pages, max_pages, page_blocks;
    bool causal;     // query t sees length - T + 1 + t keys; false: all of them
    int tiles;       // row tiles of 8: ceil(R / 8)
    int max_splits;  // pieces of a sequence at most
    int cta_slots;   // CTAs the whole device holds at once, what the piece count aims for
    float mixed_piece;  // pieces of batches of mixed lengths, as a fraction of the even share of a CTA
    int window;      // > 0: every query sees its last `window` keys only
    int rotate_order, rotate_pow2;  // R3 on the queries, 0 = none
    int ring_stages;                // of every warp's private ring
    bool always_masks;              // one body of instructions for all stages: less to fetch where sequences are short
    int cluster;                    // decode_cluster.cuh: CTAs of a cluster, which is a column
    int slice_shift;                // log2 of the mmas (16 dims) that one of them adds up
    float scale_log2;               // score scale * log2(e)
};

}  // namespace quarot
