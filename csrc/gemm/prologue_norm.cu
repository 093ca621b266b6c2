// Instantiations of the few-token kernel behind residual add + RMSNorm + quantiser.
#include "gemm/prologue_norm.cuh"

#include "gemm/prologue.h"
#include "gemm/skinny_launch.cuh"

namespace quarot {
namespace {

template <typename T, int ROWS, int WARPS>
cudaError_t run(SkinnyProblem const& p, NormInput const& in) {
    using Rows = skinny::NormRows<T, ROWS>;
    typename Rows::Arguments const arguments{static_cast<T const*>(in.x),
                                             static_cast<T const*>(in.residual),
                                             in.x_stride,
                                             in.residual_stride,
                                             static_cast<T*>(in.sum),
                                             {in.k, in.eps, in.clip_over_qmax, in.bits}};
    return skinny::run<skinny::Int4Tiles, Rows, 1, 4, WARPS, 1>(p, arguments, 0);
}

template <typename T>
cudaError_t dispatch(SkinnyProblem const& p, NormInput const& in) {
    if (p.k <= 4096) return p.m == 1 ? run<T, 1, 16>(p, in) : run<T, 2, 16>(p, in);
    return p.m == 1 ? run<T, 1, 32>(p, in) : run<T, 2, 32>(p, in);
}

}  // namespace

cudaError_t add_rms_norm_gemm(SkinnyProblem const& p, NormInput const& in) {
    bool const serves = p.format == WeightFormat::kInt4Tiles && p.groups == 0 && p.m >= 1 && p.m <= kPrologueTokens &&
                        p.k <= kPrologueK && in.k % 8 == 0 && in.bits >= 2 && in.bits <= 8;
    if (!serves || in.dtype == DType::kFloat32) return cudaErrorInvalidValue;
    return in.dtype == DType::kFloat16 ? dispatch<__half>(p, in) : dispatch<__nv_bfloat16>(p, in);
}

}  // namespace quarot
