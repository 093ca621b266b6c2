// The problem description of the Hopper GEMMs; includes no CUTLASS.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace quarot::sm90 {

/// One GEMM call. Pointers are device pointers; `k` is the padded width (row length of `codes`), `ldd` the row length
/// of `out`.
struct GemmProblem {
    void const* codes;          ///< int8 [m, k]
    float const* row_scale;     ///< float32 [m]
    void const* weight;         ///< packed int4 tiles, or int8 [n, k]
    float const* weight_scale;  ///< float32 [n]
    float const* bias;          ///< float32 [n] or null
    void* out;                  ///< 16-bit [m, ldd]
    int m;
    int readable_rows;  ///< rows of `codes` that may be read, at least m; what those from m on hold does not matter
    int n;
    int k;
    int ldd;
    bool bf16;
    void* workspace;
    std::size_t workspace_bytes;
    int sm_count;
    cudaStream_t stream;
    int swizzle = 0;  ///< channel tiles in a row, of the large CUTLASS kernels; 0: as many as launch.h takes
};

}  // namespace quarot::sm90
