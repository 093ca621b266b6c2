// The few-token GEMM for one row of stored codes: packed int4 weights, a scale a channel, 16-bit output.
#pragma once

#include "gemm/skinny.h"

namespace quarot::sm90 {

constexpr int kOneRowK = 32768;  ///< the longest row it holds

/// p.m = 1, p.k <= kOneRowK; 16 or 32 warps a block. Output and sums as of every few-token kernel, bit for bit.
cudaError_t one_row_gemm(SkinnyProblem const& p, int warps);

}  // namespace quarot::sm90
