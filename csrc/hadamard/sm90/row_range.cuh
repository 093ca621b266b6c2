// When a row leaves the range of the fp16 values between the factors, and how codes come from its accumulators.
#pragma once

#include "device/quantize_row.cuh"
#include "hadamard/sm90/stage1.cuh"
#include "hadamard/sm90/warp_mma.cuh"

namespace quarot::sm90 {

// fp16 values up to 16 K (T = 1; 32 K beyond) cannot overflow in H_32 (gain 32/8 or 32/16). A row with a larger value
// after stage 1, or with none above 2^-7 (where fp16 would lose digits), is redone; so is one with a |gate * up| of 16
// times its largest value, where the error of tanh.approx would show.
template <bool kSilu, int T>
__device__ __forceinline__ bool leaves_range(float largest, float products) {
    constexpr float kLimit = T == 1 ? 16256.0f : 32512.0f, kLive = 0.0078125f, kTower = 16.0f;
    return !(largest <= kLimit && largest >= kLive) || (kSilu && !(products <= kTower * largest));
}

// The power of two that brings the largest value (as fp32 bits) to 256 .. 512; 1 for zero, infinity and NaN.
__device__ __forceinline__ float range_factor(unsigned top) {
    if (top == 0 || top >= 0x7f800000u) return 1.0f;
    const int exponent = max(static_cast<int>(top >> 23) - 127, -119) - 8;
    return __uint_as_float(static_cast<unsigned>(127 - exponent) << 23);
}

// Codes of four accumulators of wgmma, times `factor` and `norm`.
struct CodeWords {
    float inverse;
    unsigned lo, hi;

    __device__ __forceinline__ CodeWords(const RowQuantizer& q, float factor, float norm)
        : inverse(q.inverse * factor * norm), lo(pair16(q.lo)), hi(pair16(q.hi)) {}

    // Lane 4 g + c has columns g and g + 8 of rows 2 c and 2 c + 1; it gets columns 4 c .. 4 c + 3 of row g (by
    // `shift` and `mask` in upper halves).
    __device__ __forceinline__ unsigned of(const float* acc, unsigned shift = 0, unsigned mask = ~0u) const {
        unsigned e[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) e[i] = __float_as_uint(fmaf(acc[i], inverse, 12582912.0f));
        const unsigned even = __vmaxs2(__vmins2(__byte_perm(e[0], e[2], 0x5410), hi), lo);
        const unsigned odd = __vmaxs2(__vmins2(__byte_perm(e[1], e[3], 0x5410), hi), lo);
        return transpose8x8(__byte_perm(even, odd, 0x6420) << shift & mask);
    }
};

}  // namespace quarot::sm90
