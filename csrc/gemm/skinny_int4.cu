// Instantiations of the few-token kernel for packed int4 weights.
#include "gemm/skinny_launch.cuh"
#include "gemm/skinny_formats.h"

namespace quarot {

cudaError_t skinny_int4(SkinnyProblem const& p, SkinnyConfig const& c) {
    using W = skinny::Int4Tiles;
    bool const two = c.blocks >= 2, wide = c.warps >= 32;
    if (c.tokens <= 8) {
        if (wide) return skinny::run<W, 1, 4, 32, 1>(p, c.cluster);
        return two ? skinny::run<W, 1, 4, 16, 2>(p, c.cluster) : skinny::run<W, 1, 4, 16, 1>(p, c.cluster);
    }
    if (c.tokens <= 16) {
        if (wide) return skinny::run<W, 2, 2, 32, 1>(p, c.cluster);
        return two ? skinny::run<W, 2, 2, 16, 2>(p, c.cluster) : skinny::run<W, 2, 4, 16, 1>(p, c.cluster);
    }
    if (two) return skinny::run<W, 4, 4, 8, 2>(p, c.cluster);
    return wide ? skinny::run<W, 4, 2, 16, 1>(p, c.cluster) : skinny::run<W, 4, 4, 16, 1>(p, c.cluster);
}

}  // namespace quarot
