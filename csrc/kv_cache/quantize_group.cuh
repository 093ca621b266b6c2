// Asymmetric quantisation of one group, exactly as quarot/ops/kv_append.py:quantize_groups (every operation rounded).
#pragma once

#include <cuda_fp16.h>

namespace quarot {

// max and min that keep NaN (fmaxf drops it).
__device__ __forceinline__ float max_nan(float a, float b) {
    float y;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
__device__ __forceinline__ float min_nan(float a, float b) {
    float y;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

constexpr float kRounding = 12582912.0f;  // 2^23 + 2^22: adding it rounds to an integer, half to even
constexpr unsigned kRoundingBits = 0x4b400000u;

// a / Levels correctly rounded (Markstein: one correction of a times the rounded reciprocal), for |a| up to the largest
// finite float and results that are normal; what is smaller becomes 0 in fp16 anyway.
template <int Levels>
__device__ __forceinline__ float divide_by_levels(float a) {
    constexpr float kReciprocal = 1.0f / Levels;
    const float quotient = __fmul_rn(a, kReciprocal);
    return __fmaf_rn(__fmaf_rn(-quotient, static_cast<float>(Levels), a), kReciprocal, quotient);
}

template <int Bits>
struct GroupQuantizer {
    static constexpr int kLevels = (1 << Bits) - 1;
    static constexpr float kRange = 1 << Bits;
    __half scale, offset;
    float wide_offset, inverse;  // 1 / (s * 2^Bits); 0: all codes are 0

    __device__ __forceinline__ GroupQuantizer(float low, float high, float clip) {
        constexpr float kMax = 65504.0f, kLargest = 3.40282347e38f;
        const float lo = __fmul_rn(low, clip), hi = __fmul_rn(high, clip);
        const bool constant = low == high, broken = !(low <= high);  // broken: a NaN in the group
        const float step = divide_by_levels<kLevels>(fminf(__fsub_rn(hi, lo), kLargest));
        scale = __float2half_rn(fminf(fmaxf(step, -kMax), kMax));
        // + 0 turns -0 into 0: which zero a minimum is depends on the order.
        offset = __float2half_rn(fminf(fmaxf(__fadd_rn(constant ? low : lo, 0.0f), -kMax), kMax));
        if (constant) scale = __ushort_as_half(0);
        if (broken) scale = offset = __ushort_as_half(0x7e00);
        const float wide_scale = __half2float(scale);
        wide_offset = __half2float(offset);
        // Rounded to the nearest; scales are fp16, so 1 / s is normal, and a power of two changes no rounding.
        inverse = wide_scale > 0.0f ? __frcp_rn(wide_scale) * (1.0f / kRange) : 0.0f;
    }

    // kRoundingBits + code. Saturation clamps below for nothing, and turns the NaN of an infinity times 0 into code 0.
    __device__ __forceinline__ unsigned rounded_bits(float x) const {
        float part;  // of the range 2^Bits
        asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(part) : "f"(__fsub_rn(x, wide_offset)), "f"(inverse));
        return __float_as_uint(__fmaf_rn(fminf(part, kLevels / kRange), kRange, kRounding));
    }

    __device__ __forceinline__ unsigned code(float x) const { return rounded_bits(x) - kRoundingBits; }

    __device__ __forceinline__ __half2 params() const { return __halves2half2(scale, offset); }
};

}  // namespace quarot
