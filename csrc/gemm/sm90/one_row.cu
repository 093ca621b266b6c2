// Instantiations of the few-token kernel for one row of stored codes.
#include "gemm/sm90/one_row.h"

#include "gemm/sm90/one_row.cuh"
#include "gemm/skinny_launch.cuh"

namespace quarot::sm90 {
namespace {

/// CHUNKS of 256 codes a warp.
template <typename T, int CHUNKS, int WARPS>
cudaError_t run(SkinnyProblem const& p, int slots) {
    using Row = skinny::StoredRow<T, CHUNKS>;
    typename Row::Arguments const row{static_cast<char const*>(p.codes), p.row_scale, p.k};
    return skinny::run<skinny::Int4Tiles, Row, 1, 4, WARPS, 1>(p, row, 0, slots);
}

template <typename T>
cudaError_t dispatch(SkinnyProblem const& p, int warps) {
    if (warps < 32) return p.k <= 16 * 256 ? run<T, 1, 16>(p, 3) : run<T, kOneRowK / (16 * 256), 16>(p, 3);
    return p.k <= 32 * 256 ? run<T, 1, 32>(p, 1) : run<T, kOneRowK / (32 * 256), 32>(p, 1);
}

}  // namespace

cudaError_t one_row_gemm(SkinnyProblem const& p, int warps) {
    bool const serves = p.format == WeightFormat::kInt4Tiles && p.groups == 0 && p.m == 1 && p.k <= kOneRowK;
    if (!serves || p.type == OutputType::kFloat32) return cudaErrorInvalidValue;
    return p.type == OutputType::kFloat16 ? dispatch<__half>(p, warps) : dispatch<__nv_bfloat16>(p, warps);
}

}  // namespace quarot::sm90
