// Instantiations of the few-token kernel for packed int4 weights.
#include "gemm/skinny_formats.h"
#include "gemm/skinny_launch.cuh"
#include "gemm/sm90/one_row.h"

namespace quarot {

cudaError_t skinny_int4(SkinnyProblem const& p, SkinnyConfig const& c) {
    using W = skinny::Int4Tiles;
    if (c.tokens == 1) return sm90::one_row_gemm(p, c.warps);
    if (c.tokens <= 8) {
        if (c.warps >= 32) return skinny::run<W, 1, 4, 32, 1>(p);
        return c.blocks >= 2 ? skinny::run<W, 1, 4, 16, 2>(p) : skinny::run<W, 1, 4, 16, 1>(p);
    }
    if (c.tokens <= 16) return skinny::run<W, 2, 4, 16, 1>(p);
    return c.warps <= 8 ? skinny::run<W, 4, 4, 8, 1>(p) : skinny::run<W, 4, 4, 16, 1>(p);
}

}  // namespace quarot
