// The INT4 tensor-core GEMM instantiations, one source file each. Names: tokens x channels of the tile (K tile 128).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace quarot::sm80 {

/// One GEMM call on device pointers; `k` is a multiple of 32, `ldd` and `n` multiples of 8 (pad the vectors of n, not
/// the tiles).
struct GemmProblem {
    void const* codes;          ///< packed int4 [m, k / 2]
    float const* row_scale;     ///< float32 [m]
    void const* weight;         ///< packed int4 [n, k / 2], row-major
    float const* weight_scale;  ///< float32 [n]
    float const* bias;          ///< float32 [n] or null
    void* out;                  ///< 16-bit [m, ldd]
    int m;
    int n;
    int k;
    int ldd;
    bool bf16;
    void* workspace;
    std::size_t workspace_bytes;
    cudaStream_t stream;
};

cudaError_t w4a4_128x256(GemmProblem const& p);
cudaError_t w4a4_128x128(GemmProblem const& p);
cudaError_t w4a4_64x128(GemmProblem const& p);
std::size_t w4a4_128x256_workspace(GemmProblem const& p);
std::size_t w4a4_128x128_workspace(GemmProblem const& p);
std::size_t w4a4_64x128_workspace(GemmProblem const& p);

/// What the current device runs for w4a4_64x128, as ten times the architecture: the one its PTX was written for, and the
/// one of its machine code. 80 and 90: the driver compiled the PTX of compute_80 for a Hopper GPU.
struct CodeVersions {
    int ptx = 0;
    int binary = 0;
};
cudaError_t w4a4_code_versions(CodeVersions& versions);

}  // namespace quarot::sm80
