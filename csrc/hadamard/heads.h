// Hadamard across heads + quantiser: the online rotation before o_proj, H_heads (x) I_head_dim.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/code_layout.h"
#include "device/dtype.h"

namespace quarot {

struct HeadsInput {
    const void* x;  // [rows, heads * head_dim], 16-byte aligned rows, fp16 or bf16
    DType dtype;
    std::int64_t row_stride, rows;
    int heads, head_dim;  // heads <= 64, head_dim a multiple of 32, at most 256
    // Signs of H_heads in the order of mma.m16n8k16 fragments: uint32 [heads <= 32 ? 2 : 4][32]; word of lane
    // (g = lane / 4, c = lane % 4), p = 4 q + i: bits 15 - p and 31 - p are set where H[16 mt + g + 8 (i % 2)][k] = -1
    // for k = 16 q + 2 c + 8 (i / 2) and for k + 1.
    const std::uint32_t* signs;
};

// Codes and scale as in quantize/quantize_per_token.h, of x (H_heads (x) I) / sqrt(heads) accumulated in fp32.
cudaError_t hadamard_heads_quantize(const HeadsInput& input, void* codes, float* scale, float clip_over_qmax, int bits,
                                    CodeLayout layout, cudaStream_t stream);

}  // namespace quarot
