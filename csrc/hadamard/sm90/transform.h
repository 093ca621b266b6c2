// The tensor-core transform (sm_90a): which shapes it has and how to launch it. Plain C++.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/code_layout.h"

namespace quarot::sm90 {

struct TransformArgs {
    const void* x;            // 16-bit elements, 16-byte aligned rows; with SiLU gate, then up n elements later
    std::int64_t row_stride;  // elements
    int rows, n, m;
    const void* table;        // H_m^T as fp16, [MP / 8][MP][8]: H_m[j][k] at ((k / 8) * MP + j) * 8 + k % 8, 0 beyond m
    void* y;                  // [rows, n], the input's type or int8 codes
    float* scale;             // [rows], codes only
    float norm;               // 1 / sqrt(n), times 8 (T = 1) or 16 (the H_64 constants are 1/8 or 1/16)
    float clip_over_qmax;
    int bits;
    CodeLayout layout;        // kBytes or kUpperHalves
    unsigned shift, mask;     // of four codes in a word, by the layout
};

// How a transform of order * pow2 is computed: as H_m (x) H_(64 tiles), m = order * pow2 / (64 tiles) padded to
// `padded_m`. padded_m = 0: no compiled shape fits.
struct TransformPlan {
    int m, padded_m, tiles;
};

TransformPlan plan_transform(std::int64_t order, std::int64_t pow2);

// What follows from the plan and the layout is filled in. `silu`: x is gate | up. `codes`: int8 codes and scale, else
// the input's type.
cudaError_t launch_transform(const TransformPlan& plan, TransformArgs args, bool silu, bool codes, bool bfloat16,
                             cudaStream_t stream);

}  // namespace quarot::sm90
