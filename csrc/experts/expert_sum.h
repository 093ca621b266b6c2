// What the experts of each token give, weighted and added in their order.
#pragma once

#include <cuda_runtime_api.h>

#include "device/dtype.h"

namespace quarot {

/// out[t, n] = sum_j x[t, j, n] * weight[t, j]: float32 products and sums, each rounded by itself, j in order, the result
/// rounded to `dtype`. x [tokens, top_k, n] and out of `dtype`, weight [tokens, top_k] of `weight_dtype`; contiguous, x and out
/// 16-byte aligned, n a multiple of 8.
cudaError_t expert_sum(void const* x, DType dtype, void const* weight, DType weight_dtype, int tokens, int top_k, int n,
                       void* out, cudaStream_t stream);

}  // namespace quarot
