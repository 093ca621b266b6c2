// Instantiations of the few-token kernel for row-major int8 weights.
#include "gemm/skinny_launch.cuh"
#include "gemm/skinny_formats.h"

namespace quarot {

cudaError_t skinny_int8(SkinnyProblem const& p, SkinnyConfig const& c) {
    using W = skinny::Int8Rows;
    if (c.tokens <= 8) return skinny::run<W, 1, 2, 16, 2>(p, c.cluster);
    if (c.tokens <= 16) return skinny::run<W, 2, 2, 16, 1>(p, c.cluster);
    return skinny::run<W, 4, 2, 16, 1>(p, c.cluster);
}

}  // namespace quarot
