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

struct GroupQuantizer {
    __half scale, offset;
    float wide_offset, inverse, levels;  // inverse 0: all codes are 0

    __device__ __forceinline__ GroupQuantizer(float low, float high, float clip, int bits) {
        constexpr float kMax = 65504.0f;
        levels = static_cast<float>((1 << bits) - 1);
        const float lo = __fmul_rn(low, clip), hi = __fmul_rn(high, clip);
        const bool constant = low == high, broken = !(low <= high);  // broken: a NaN in the group
        const float step = __fdiv_rn(__fsub_rn(hi, lo), levels);
        scale = __float2half_rn(fminf(fmaxf(step, -kMax), kMax));
        // + 0 turns -0 into 0: which zero a minimum is depends on the order.
        offset = __float2half_rn(fminf(fmaxf(__fadd_rn(constant ? low : lo, 0.0f), -kMax), kMax));
        if (constant) scale = __ushort_as_half(0);
        if (broken) scale = offset = __ushort_as_half(0x7e00);
        const float wide_scale = __half2float(scale);
        wide_offset = __half2float(offset);
        inverse = wide_scale > 0.0f ? __fdiv_rn(1.0f, wide_scale) : 0.0f;
    }

    // kRoundingBits + code. With inverse 0 (or NaN: fmaxf drops it) the code is 0.
    __device__ __forceinline__ unsigned rounded_bits(float x) const {
        const float scaled = __fmul_rn(__fsub_rn(x, wide_offset), inverse);
        return __float_as_uint(__fadd_rn(fminf(fmaxf(scaled, 0.0f), levels), kRounding));
    }

    __device__ __forceinline__ unsigned code(float x) const { return rounded_bits(x) - kRoundingBits; }

    __device__ __forceinline__ __half2 params() const { return __halves2half2(scale, offset); }
};

}  // namespace quarot
