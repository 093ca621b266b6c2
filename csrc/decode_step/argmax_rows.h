// The most likely token of every row.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/dtype.h"

namespace quarot {

// out[b] = the smallest index of the largest of logits[b, 0 .. columns-1] (dtype, rows row_stride elements apart). NaN is
// larger than everything, as in torch.argmax.
cudaError_t argmax_rows(const void* logits, DType dtype, std::int64_t row_stride, int rows, int columns,
                        std::int64_t* out, cudaStream_t stream);

}  // namespace quarot
