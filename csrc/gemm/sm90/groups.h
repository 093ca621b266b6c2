// GEMM for many tokens with one weight scale a group of K, on Hopper; includes no CUTLASS.
#pragma once

#include "gemm/sm90/problem.h"

namespace quarot::sm90 {

/// `weight_scale` of `problem` is float32 [n, k / group_size]; `group_size` is a multiple of 64; the tile is of
/// 128 x 128, 64 x 128, 64 x 64 or 64 x 32 channels x tokens. Needs no workspace.
cudaError_t w4a8_groups(GemmProblem const& problem, int group_size, int channels, int tokens);

}  // namespace quarot::sm90
