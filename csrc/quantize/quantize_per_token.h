// Per-token symmetric quantisation of activations.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/code_layout.h"
#include "device/dtype.h"

namespace quarot {

// x [rows, k], consecutive within a row, rows `row_stride` elements apart. kp = k rounded up to 32.
// codes: int8 [rows, kp] (columns >= k are 0), or as nibbles uint8 [rows, kp / 2].
// scale: fp32 [rows]. clip_over_qmax = fp32(clip / (2^(bits-1) - 1)). The exact rule: device/quantize_row.cuh.
cudaError_t quantize_per_token(const void* x, DType dtype, std::int64_t row_stride, std::int64_t rows, std::int64_t k,
                               void* codes, float* scale, float clip_over_qmax, int bits, CodeLayout layout,
                               cudaStream_t stream);

}  // namespace quarot
