// silu(g) = g / (1 + exp(-g)) in fp32.
#pragma once

namespace quarot {

// Two special-function operations; relative error below 1e-5 (|g| 2^-24 from the exponent), 0 for g < -88.
__device__ __forceinline__ float silu_exact(float g) {
    float e, r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(g * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
    return g * r;
}

// silu(g) * up with one special-function operation: h + h tanh(h), h = g / 2. tanh.approx has a relative error of
// 2^-11, so the absolute error is at most |g up| 2^-12: one fp16 rounding of the product for g > 0, but much of the
// small value that silu has at g < -3. The caller compares the largest |g up| of a row with its largest result.
__device__ __forceinline__ float silu_tanh_times(float g, float up) {
    const float h = 0.5f * g, product = h * up;
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(h));
    return fmaf(product, t, product);
}

}  // namespace quarot
