// The GEMMs of a mixture of experts on few tokens: every row has an expert, whose number is on the device only.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "gemm/skinny.h"

namespace quarot {

constexpr int kMostExpertRows = 256;  ///< of one call

/// out[r, n] = ((float)sum_k codes[r / top_k, k] * w[expert[r], n, k]) * row_scale[r / top_k] * weight_scale[expert[r], n],
/// the integers and the float steps of gemm.h. A row whose expert does not exist is NaN.
struct ExpertProblem {
    void const* codes;            ///< int8 [rows / top_k, k], 16-byte aligned
    float const* row_scale;       ///< float32 [rows / top_k]
    std::int64_t const* expert;   ///< [rows]
    void const* weight;           ///< packed int4 tiles [experts, n / 16, k / 32, 256]
    float const* weight_scale;    ///< float32 [experts, n], 16-byte aligned
    void* out;                    ///< [rows, n] of `type`
    int rows;                     ///< at most kMostExpertRows
    int top_k;                    ///< experts of a row of codes, so many rows of `out` one after the other
    int experts;
    int n;  ///< a multiple of 16
    int k;  ///< padded: a multiple of 32
    OutputType type;
    cudaStream_t stream;
};

cudaError_t expert_gemm_w4a4(ExpertProblem const& problem);

}  // namespace quarot
