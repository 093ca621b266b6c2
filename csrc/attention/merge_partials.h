// Launcher of merge_partials; the op is specified in quarot/ops/merge_partials.py.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/dtype.h"

namespace quarot {

// One part: out [B, H, T, D], the D elements of a row side by side, and lse [B, H, T]; strides in elements.
struct PartialResult {
    const void* out;
    const float* lse;
    std::int64_t out_stride[3], lse_stride[3];
    DType dtype;
};

struct MergeParams {
    PartialResult parts[2];
    void* out;   // [B, T, H, D] of dtype
    float* lse;  // [B, T, H]
    DType dtype;
    int batch, tokens, heads, head_dim;  // head_dim a multiple of 4
};

cudaError_t merge_partials(const MergeParams& params, cudaStream_t stream);

}  // namespace quarot
