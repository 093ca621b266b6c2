// Instantiations of the few-token kernel behind the Hadamard across heads + quantiser.
#include "gemm/prologue_heads.cuh"

#include <cmath>

#include "gemm/prologue.h"
#include "gemm/skinny_launch.cuh"

namespace quarot {
namespace {

constexpr int kWarps = 16;

template <typename T, int TILES, bool ONE_ROW>
cudaError_t run(SkinnyProblem const& p, HeadsInput const& in, float clip_over_qmax, int bits) {
    using Heads = skinny::RotatedHeads<T, TILES, ONE_ROW>;
    if (!Heads::fits(in.head_dim, kWarps)) return cudaErrorInvalidValue;
    typename Heads::Arguments const arguments{static_cast<T const*>(in.x),
                                              in.row_stride,
                                              in.heads,
                                              in.head_dim,
                                              in.signs,
                                              static_cast<float>(1.0 / std::sqrt(static_cast<double>(in.heads))),
                                              clip_over_qmax,
                                              bits};
    int const shared = p.m * Heads::row_bytes(in.head_dim);
    return skinny::run<skinny::Int4Tiles, Heads, 1, 4, kWarps, 1>(p, arguments, shared);
}

template <typename T>
cudaError_t dispatch(SkinnyProblem const& p, HeadsInput const& in, float clip_over_qmax, int bits) {
    bool const two = heads::tiles(in.heads) == 2;
    auto const chosen = p.m == 1 ? (two ? run<T, 2, true> : run<T, 4, true>) : (two ? run<T, 2, false> : run<T, 4, false>);
    return chosen(p, in, clip_over_qmax, bits);
}

// What a block needs for `rows` rows at the least, with the sums of one strip. 2048: what skinny_launch.cuh leaves for what
// prologues declare themselves.
template <int TILES>
int least_shared(int rows, int head_dim) {
    using Heads = skinny::RotatedHeads<__half, TILES, false>;
    using Layout = skinny::SharedLayout<skinny::Int4Tiles, Heads, 1, 4>;
    return Layout::total(Heads::template code_bytes<Layout, kWarps>(rows), 1) + rows * Heads::row_bytes(head_dim) + 2048;
}

}  // namespace

int heads_gemm_rows(int heads, int head_dim, int shared_bytes) {
    auto const least = heads::tiles(heads) == 2 ? least_shared<2> : least_shared<4>;
    int rows = kPrologueTokens;
    while (rows > 0 && least(rows, head_dim) > shared_bytes) --rows;
    return rows;
}

cudaError_t heads_gemm(SkinnyProblem const& p, HeadsInput const& in, float clip_over_qmax, int bits) {
    bool const serves = p.format == WeightFormat::kInt4Tiles && p.groups == 0 && p.m >= 1 && p.m <= kPrologueTokens &&
                        p.k <= kHeadsK && p.k == in.heads * in.head_dim && in.heads >= 1 &&
                        in.heads <= heads::kMaxHeads && in.head_dim % 32 == 0 && in.head_dim <= heads::kMaxHeadDim &&
                        bits >= 2 && bits <= 8;
    if (!serves || in.dtype == DType::kFloat32) return cudaErrorInvalidValue;
    return in.dtype == DType::kFloat16 ? dispatch<__half>(p, in, clip_over_qmax, bits)
                                       : dispatch<__nv_bfloat16>(p, in, clip_over_qmax, bits);
}

}  // namespace quarot
