// RMSNorm of one row in an order of additions that does not depend on the block that does it: every kernel that follows
// it gets the same bits. A warp has 256 consecutive columns, eight a lane, and adds their squares lane by lane, then by
// butterfly; the sums of the (at most 64) warps' columns are added by butterfly in their turn.
#pragma once

#include "device/quantize_row.cuh"
#include "device/reduce.cuh"

namespace quarot {

inline constexpr int kWarpColumns = 256;  // what the 32 lanes of a warp hold at a time

// What the row's reductions lead to: h = sum * norm, and how h becomes codes.
struct RowNorm {
    float norm;
    RowQuantizer q;
};

struct NormRule {
    int k;  // columns
    float eps;
    float clip_over_qmax;
    int bits;
    CodeLayout layout = CodeLayout::kBytes;
};

// Squares and absmax of one lane's eight columns of 256.
__device__ __forceinline__ float2 lane_squares(const float (&v)[8]) {
    float squares = 0.0f;
    unsigned top = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        squares = fmaf(v[j], v[j], squares);
        top = max(top, abs_bits(v[j]));
    }
    return make_float2(squares, __uint_as_float(top));
}

// The same of the warp's 256 columns, in every lane.
__device__ __forceinline__ float2 warp_squares(float2 lane) {
    const unsigned top = __reduce_max_sync(kFullWarp, __float_as_uint(lane.y));
    return make_float2(warp_sum(lane.x), __uint_as_float(top));
}

// The row's, from those of its 256-column pieces (`count` of them, at most 64, in shared memory); a whole warp calls it.
__device__ __forceinline__ float2 row_squares(const float2* pieces, int count) {
    const int lane = threadIdx.x & 31;
    float2 mine = lane < count ? pieces[lane] : make_float2(0.0f, 0.0f);
    if (lane + 32 < count) {
        const float2 other = pieces[lane + 32];
        const unsigned top = max(__float_as_uint(mine.y), __float_as_uint(other.y));
        mine = make_float2(mine.x + other.x, __uint_as_float(top));
    }
    return warp_squares(mine);
}

// absmax(h) = absmax(sum) * norm exactly, because rounding is monotonic.
__device__ __forceinline__ RowNorm row_norm(float2 squares, const NormRule& rule) {
    const float mean = __fdiv_rn(squares.x, static_cast<float>(rule.k));
    const float norm = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, rule.eps)));
    return {norm, row_quantizer(__fmul_rn(squares.y, norm), rule.clip_over_qmax, rule.bits, rule.layout)};
}

}  // namespace quarot
