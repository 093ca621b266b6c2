// The first kernel of a decode step: everything that depends on the token and its place, but on no layer.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/dtype.h"

namespace quarot {

// Notation: B rows, one new token each; V vocabulary, H hidden, R rotary dims, W pages a row of the table holds.
struct BeginStepParams {
    const std::int64_t* ids;    // [B]
    const void* embedding;      // [V, H] of dtype
    std::int32_t* before;       // [B], tokens a row holds; one more afterwards if `advance`
    std::int64_t* positions;    // [B], for the rotary embedding; one more afterwards if `advance`
    const std::int32_t* table;  // [B, W] page ids
    const float* inverse_frequency;  // [R / 2]
    void* hidden;               // out [B, H] of dtype: the row of the token; NaN for an id outside 0 .. V-1
    std::int32_t* lengths;      // out [B]: before + 1
    std::int64_t* slots;        // out [B]: page * page_size + offset of the new token; -1 where the row is full
    void* cos;                  // out [B, R] of dtype: cos(position * inverse_frequency) * scaling, both halves alike
    void* sin;
    std::int64_t vocabulary, hidden_bytes;
    int batch, width, page_size, rotary_dim;
    float scaling;
    DType dtype;
    bool advance;
};

cudaError_t begin_step(const BeginStepParams& params, cudaStream_t stream);

}  // namespace quarot
