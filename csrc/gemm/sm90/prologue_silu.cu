// Instantiations of the few-token kernel behind silu(gate) * up + Hadamard + quantiser.
#include "gemm/sm90/prologue_silu.cuh"

#include <cmath>

#include "gemm/prologue.h"
#include "gemm/skinny_launch.cuh"

namespace quarot::sm90 {
namespace {

template <typename Element>
cudaError_t run(SkinnyProblem const& p, SiluInput const& in) {
    using Rows = skinny::RotatedSilu<Element, kSiluOrder>;
    typename Rows::Arguments const arguments{static_cast<Element const*>(in.gate_up),
                                             in.m,
                                             in.signs,
                                             static_cast<float>(8.0 / std::sqrt(64.0 * in.m)),
                                             in.clip_over_qmax,
                                             in.bits};
    return skinny::run<skinny::Int4Tiles, Rows, 1, 4, 16, 1>(p, arguments, Rows::kBytes);
}

}  // namespace

cudaError_t silu_gemm(SkinnyProblem const& p, SiluInput const& in) {
    bool const serves = p.format == WeightFormat::kInt4Tiles && p.groups == 0 && p.m == 1 && p.k == 64 * in.m &&
                        in.m % 4 == 0 && in.m >= 4 && in.m <= kSiluOrder && in.bits >= 2 && in.bits <= 8;
    if (!serves) return cudaErrorInvalidValue;
    return in.bfloat16 ? run<__nv_bfloat16>(p, in) : run<__half>(p, in);
}

}  // namespace quarot::sm90
