// Instantiations of the few-token kernel for row-major int8 weights.
#include "gemm/skinny_formats.h"
#include "gemm/skinny_launch.cuh"

namespace quarot {

cudaError_t skinny_int8(SkinnyProblem const& p, SkinnyConfig const& c) {
    using W = skinny::Int8Rows;
    if (c.tokens <= 8) return skinny::run<W, 1, 4, 16, 1>(p);
    if (c.tokens <= 16) return skinny::run<W, 2, 2, 16, 1>(p);
    return skinny::run<W, 4, 2, 16, 1>(p);
}

}  // namespace quarot
