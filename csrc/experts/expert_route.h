// The router of a mixture of experts behind its matrix product: softmax, the top k, and their weights.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/dtype.h"

namespace quarot {

constexpr int kMostExperts = 512;

/// For each of `rows` rows of logits [rows, experts] (contiguous, `dtype`): expert [rows, top_k] are its largest logits,
/// largest first, the first of equals first (NaN is larger than everything); weight [rows, top_k] of `weight_dtype` their
/// softmax over all experts in float32, divided by the sum of the row's weights (added in order) if `normalize`.
cudaError_t expert_route(void const* logits, DType dtype, int rows, int experts, int top_k, bool normalize, void* weight,
                         DType weight_dtype, std::int64_t* expert, cudaStream_t stream);

}  // namespace quarot
