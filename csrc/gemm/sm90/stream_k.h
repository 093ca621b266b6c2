// The Stream-K instantiation: the Hopper kernel that needs a workspace which CUTLASS clears itself.
#pragma once

#include "gemm/sm90/problem.h"

namespace quarot::sm90 {

cudaError_t w4a8_128x128_stream_k(GemmProblem const& p);
std::size_t w4a8_128x128_stream_k_workspace(GemmProblem const& p);

}  // namespace quarot::sm90
