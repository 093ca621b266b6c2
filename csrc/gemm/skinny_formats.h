// One function per weight format, each in its own source file (they compile in parallel).
#pragma once

#include "gemm/skinny.h"

namespace quarot {

cudaError_t skinny_int4(SkinnyProblem const& problem, SkinnyConfig const& config);
cudaError_t skinny_int8(SkinnyProblem const& problem, SkinnyConfig const& config);
cudaError_t skinny_grouped(SkinnyProblem const& problem);
cudaError_t tile_int4(SkinnyProblem const& problem);

}  // namespace quarot
