// The structured Hadamard transform of any size on any GPU from sm_80 on. Correct first; the fast paths are elsewhere.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/code_layout.h"
#include "device/dtype.h"

namespace quarot {

// Each row of width blocks * order * pow2 * inner, seen as [blocks, order, pow2, inner], is multiplied by
// H_order (x) H_pow2 (x) I_inner / sqrt(order * pow2), accumulated in fp32.
struct HadamardShape {
    std::int64_t blocks, order, pow2, inner;
    std::int64_t unit() const { return order * pow2 * inner; }
    std::int64_t width() const { return blocks * unit(); }
};

// What is read: x [rows, width], or with `silu` gate | up [rows, 2 * width] (then silu(gate) * up is transformed).
struct HadamardInput {
    const void* x;
    DType dtype;
    std::int64_t row_stride, rows;  // elements
    bool silu;
    HadamardShape shape;
    // Signs of H_order in the order of mma fragments (unused for order 1): uint32, one word a lane,
    // [ceil(order / 16)][ceil(order / 64)][32]. Word of lane (g = lane / 4, c = lane % 4): bit 31 - (4 q + i) is set
    // where H[16 mt + g + 8 (i % 2)][64 kt + 8 q + c + 4 (i / 2)] = -1.
    const std::uint32_t* signs;
};

// y [rows, width] contiguous, in the input's type. Not with silu.
cudaError_t hadamard_any_size(const HadamardInput& input, void* y, cudaStream_t stream);

// Codes and scale as in quantize/quantize_per_token.h. Nibbles need an even pow2 * inner.
cudaError_t hadamard_quantize_any_size(const HadamardInput& input, void* codes, float* scale, float clip_over_qmax,
                                       int bits, CodeLayout layout, cudaStream_t stream);

}  // namespace quarot
