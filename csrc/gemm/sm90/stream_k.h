// The Stream-K instantiation: the only Hopper kernel here that needs a workspace.
#pragma once

#include "gemm/sm90/problem.h"

namespace quarot::sm90 {

cudaError_t w4a8_128x64_stream_k(GemmProblem const& p);
std::size_t w4a8_128x64_stream_k_workspace(GemmProblem const& p);

}  // namespace quarot::sm90
