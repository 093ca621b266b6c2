// The tile for 33-128 tokens of narrow layers.
#pragma once

#include "gemm/sm90/problem.h"

namespace quarot::sm90 {

cudaError_t w4a8_64x64(GemmProblem const& p);

}  // namespace quarot::sm90
