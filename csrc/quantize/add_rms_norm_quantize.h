// Residual add + RMSNorm (no gain) + per-token quantisation in one pass over the row.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/code_layout.h"
#include "device/dtype.h"

namespace quarot {

// x and residual [rows, k], consecutive within a row; residual may be null.
//   sum = x + residual, rounded to dtype (x itself without a residual); written to `sum` [rows, k] contiguous, if given
//   h = sum * (1 / sqrt(mean(sum^2) + eps)) in fp32; codes and scale of h as in quantize_per_token.h.
cudaError_t add_rms_norm_quantize(const void* x, std::int64_t x_stride, const void* residual,
                                  std::int64_t residual_stride, DType dtype, std::int64_t rows, std::int64_t k,
                                  float eps, void* codes, float* scale, void* sum, float clip_over_qmax, int bits,
                                  CodeLayout layout, cudaStream_t stream);

// h itself, rounded to dtype, into `out` [rows, k] contiguous.
cudaError_t add_rms_norm(const void* x, std::int64_t x_stride, const void* residual, std::int64_t residual_stride,
                         DType dtype, std::int64_t rows, std::int64_t k, float eps, void* out, cudaStream_t stream);

}  // namespace quarot
