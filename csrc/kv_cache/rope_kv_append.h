// Launcher of rope_kv_append; the op is specified in quarot/ops/rope_kv_append.py.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/dtype.h"
#include "kv_cache/format.h"

namespace quarot {

// Notation: T tokens, Hq query and kv_heads key heads, D head_dim, R rotary dims, P rows of the cos and sin tables.
struct RopeAppendParams {
    std::uint8_t* pool;         // [num_pages, kv_heads, page_blocks, block_bytes]
    const void* qkv;            // [T, (Hq + 2 kv_heads) * D] of dtype, rows qkv_stride elements apart
    const void* cos;            // [P, R] of dtype; token t reads row t % P
    const void* sin;
    const void* query_norm;     // [D] of dtype, gain of a per-head RMSNorm, or null
    const void* key_norm;
    void* query;                // out [T, Hq, D] of dtype
    const std::int64_t* slots;  // [T], negative = skip
    std::int64_t qkv_stride;
    KVFormat format;
    DType dtype;
    int tokens, query_heads, kv_heads, num_pages, page_blocks;
    int rotary_dim, table_rows;
    float key_clip, value_clip, eps;
    int rotate;  // R3 on queries and keys
    bool one_each;  // every token belongs to another sequence: decode attention may start while they are stored
};

// Whether rope_kv_append has a kernel for the format.
bool rope_kv_append_serves(const KVFormat& format, int rotary_dim);

cudaError_t rope_kv_append(const RopeAppendParams& params, cudaStream_t stream);

}  // namespace quarot
