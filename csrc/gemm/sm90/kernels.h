// The Hopper GEMMs with int8 weights, one source file each. Names: weight rows x tokens of the tile (K tile 128), schedule.
#pragma once

#include "gemm/sm90/problem.h"

namespace quarot::sm90 {

cudaError_t w8a8_128x256(GemmProblem const& p);
cudaError_t w8a8_128x128_pingpong(GemmProblem const& p);

}  // namespace quarot::sm90
