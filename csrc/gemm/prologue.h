// Few-token GEMMs that make their own activation codes: what stood in a kernel before them is their prologue, and one
// wait between kernels less. Equal bit for bit to the two kernels they replace.
#pragma once

#include <cstdint>

#include "gemm/skinny.h"
#include "hadamard/heads.h"
#include "quantize/add_rms_norm_quantize.h"

namespace quarot {

constexpr int kPrologueTokens = 8;  ///< most rows
constexpr int kPrologueK = 8192;   ///< most columns: one chunk a warp
constexpr int kHeadsK = 4096;      ///< most columns behind a rotation across heads

/// Rows as add_rms_norm_quantize takes them; fp16 or bf16, rows 16-byte aligned, k a multiple of 8.
struct NormInput {
    void const* x;
    void const* residual;  ///< or null
    int64_t x_stride, residual_stride;
    DType dtype;
    int k;  ///< real columns; the problem's k is padded
    float eps;
    float clip_over_qmax;
    int bits;
    void* sum;  ///< [m, k] contiguous; apart from x and residual, which other blocks still read
};

/// `problem.codes` and `problem.row_scale` are not looked at; int4 tiles without groups.
cudaError_t add_rms_norm_gemm(SkinnyProblem const& problem, NormInput const& input);
cudaError_t heads_gemm(SkinnyProblem const& problem, HeadsInput const& input, float clip_over_qmax, int bits);

/// Most rows of heads_gemm on a GPU with so much shared memory for a block: 99 KB (sm_86, sm_89) are too little for some.
int heads_gemm_rows(int heads, int head_dim, int shared_bytes);

/// gate | up of one row, fp16 or bf16, 16-byte aligned, k = 64 m columns each, for the transform H_m (x) H_64.
struct SiluInput {
    void const* gate_up;
    bool bfloat16;
    int m;                       ///< a multiple of 4, at most kSiluOrder
    std::uint8_t const* signs;   ///< of H_m, as RotatedSilu (sm90/prologue_silu.cuh) wants them
    float clip_over_qmax;
    int bits;
};

constexpr int kSiluOrder = 176;

namespace sm90 {
cudaError_t silu_gemm(SkinnyProblem const& problem, SiluInput const& input);
}

}  // namespace quarot
