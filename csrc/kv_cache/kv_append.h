// Launchers of kv_append and kv_gather; the ops are specified in quarot/ops/kv_append.py and kv_gather.py.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/dtype.h"
#include "kv_cache/format.h"

namespace quarot {

struct AppendParams {
    std::uint8_t* pool;          // [num_pages, kv_heads, page_blocks, block_bytes]
    const void* key;             // [tokens, kv_heads, head_dim] of dtype, unit stride in the last dim
    const void* value;
    const std::int64_t* slots;   // [tokens], negative = skip
    const std::int8_t* rotation_signs;  // [order, order], null for order 1
    std::int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;  // elements
    KVFormat format;
    DType dtype;
    int tokens, kv_heads, num_pages, page_blocks;
    float key_clip, value_clip;
    int rotate_order, rotate_pow2;  // 0 = none
};

// `generic`: use the kernel for every format even where a tuned one exists (tests).
cudaError_t kv_append(const AppendParams& params, bool generic, cudaStream_t stream);

struct GatherParams {
    const std::uint8_t* pool;
    const std::int64_t* slots;  // [tokens], negative gives zeros
    void* key;                  // [tokens, kv_heads, head_dim] of dtype
    void* value;
    KVFormat format;
    DType dtype;
    int tokens, kv_heads, num_pages, page_blocks;
};

cudaError_t kv_gather(const GatherParams& params, cudaStream_t stream);

}  // namespace quarot
