// GEMM for few tokens (decode), every architecture from sm_80 on; also the fallback for any number of tokens.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace quarot {

enum class OutputType : int { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };
enum class WeightFormat : int { kInt4Tiles = 0, kInt8Rows = 1 };

/// One call. Device pointers; `k` is the padded width (a multiple of 32) and the row length of `codes`.
struct SkinnyProblem {
    void const* codes;          ///< int8 [m, k], 16-byte aligned
    float const* row_scale;     ///< float32 [m]
    void const* weight;         ///< packed int4 tiles [ceil(n/16), k/32, 256], or int8 [n, k]
    float const* weight_scale;  ///< float32 [n], or [n, groups] when groups > 0
    float const* bias;          ///< float32 [n] or null
    void* out;                  ///< [m, ldd] of `type`
    int m;
    int n;
    int k;
    int ldd;
    int groups;      ///< number of scale groups along K; 0 = one scale a channel
    int group_size;  ///< K / groups, a multiple of 32; ignored when groups == 0
    OutputType type;
    WeightFormat format;
    cudaStream_t stream;
    void const* residual = nullptr;  ///< [m, n] of `type`, added to the rounded output; prologue_*.cu only
    int64_t residual_stride = 0;
};

/// How to run it; dispatch.h picks by size, the tuner passes its own.
struct SkinnyConfig {
    int tokens;   ///< tokens of one pass over the weights: 8, 16 or 32, or 1 (sm90/one_row.h)
    int warps;    ///< 8 (32 tokens on GPUs with 99 KB of shared memory), 16 or 32 a block
    int blocks;   ///< resident blocks an SM: 1 or 2
};

}  // namespace quarot
