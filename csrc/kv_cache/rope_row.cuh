// Norm, RoPE and R3 of a row of one head in registers, and the loads that bring it there.
//
// A row is 8 lanes, 4 rows a warp, as in append_rows.cuh. Lane i holds dims 16 I + 2 i + e throughout, so the partner of
// rotate-half (dim + R/2, R a multiple of 32) is another register of the same lane. R3's butterflies of distance 2, 4, 8
// cross lanes, all others stay inside; they run in the order 1, 2, 4, .. of rotate_heads.
#pragma once

#include "kv_cache/append_rows.cuh"
#include "kv_cache/rope_kv_append.h"

namespace quarot {

template <int D>
__device__ __forceinline__ void normalize_row(float (&x)[D / 8], const void* gain, DType dtype, float eps, int place) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 8; ++i) squares += x[i] * x[i];
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, distance);
    float gains[D / 8];
    load_row<D>(gain, dtype, place, gains);
    const float inverse = rsqrtf(squares * (1.0f / D) + eps);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        x[2 * i] = x[2 * i] * inverse * gains[2 * i], x[2 * i + 1] = x[2 * i + 1] * inverse * gains[2 * i + 1];
    }
}

// x cos + rotate_half(x) sin on the first R dims. Registers need constant indices: one unrolled pass per possible R.
template <int D, int Half = 16>
__device__ __forceinline__ void rope_row(float (&x)[D / 8], const void* cos, const void* sin, DType dtype,
                                         int rotary_dim, int place) {
    if constexpr (Half <= D / 2) {
        if (2 * Half != rotary_dim) return rope_row<D, Half + 16>(x, cos, sin, dtype, rotary_dim, place);
        constexpr int kPer = 2 * Half / 8;
        float c[kPer], s[kPer];
        load_row<2 * Half>(cos, dtype, place, c);
        load_row<2 * Half>(sin, dtype, place, s);
#pragma unroll
        for (int j = 0; j < kPer / 2; ++j) {
            const float a = x[j], b = x[j + kPer / 2];
            x[j] = __fadd_rn(__fmul_rn(a, c[j]), __fmul_rn(-b, s[j]));
            x[j + kPer / 2] = __fadd_rn(__fmul_rn(b, c[j + kPer / 2]), __fmul_rn(a, s[j + kPer / 2]));
        }
    }
}

template <int D>
__device__ __forceinline__ void rotate_row_in_place(float (&x)[D / 8], int place) {
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a + b, x[2 * i + 1] = a - b;
    }
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
        const float sign = place & distance ? -1.0f : 1.0f;
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
            x[j] = fmaf(x[j], sign, __shfl_xor_sync(0xffffffffu, x[j], distance));  // exact product: one rounding
    }
#pragma unroll
    for (int distance = 1; distance < D / 16; distance *= 2) {
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            if (i & distance) continue;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float a = x[2 * i + e], b = x[2 * (i + distance) + e];
                x[2 * i + e] = a + b, x[2 * (i + distance) + e] = a - b;
            }
        }
    }
    const float scale = static_cast<float>(1.0 / sqrt(static_cast<double>(D)));
#pragma unroll
    for (int j = 0; j < D / 8; ++j) x[j] *= scale;
}

__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

// Head `head` of token `token` (for lanes that are not `valid`: some row), normalised, turned and rotated: lane `place` of
// its eight. Tables, slots and row are asked for together: one trip to memory. `instead`: if not null, read in place of all.
template <int D>
__device__ __forceinline__ void load_head(const RopeAppendParams& p, int token, int head, int place, float (&x)[D / 8],
                                          const void* instead = nullptr) {
    const int element = p.dtype == DType::kFloat32 ? 4 : 2;
    const bool is_query = head < p.query_heads, is_value = head >= p.query_heads + p.kv_heads;
    const auto at = [&](const void* base, std::int64_t index) {
        return instead != nullptr ? static_cast<const std::uint8_t*>(instead)
                                  : static_cast<const std::uint8_t*>(base) + index * element;
    };
    const std::int64_t row = static_cast<std::int64_t>(token % p.table_rows) * p.rotary_dim;
    if (!is_value && place * 64 < p.rotary_dim && instead == nullptr)
        prefetch_line(at(p.cos, row + place * 64)), prefetch_line(at(p.sin, row + place * 64));
    load_row<D>(at(p.qkv, token * p.qkv_stride + head * D), p.dtype, place, x);
    if (is_value) return;
    const void* gain = is_query ? p.query_norm : p.key_norm;
    if (gain != nullptr) normalize_row<D>(x, at(gain, 0), p.dtype, p.eps, place);
    rope_row<D>(x, at(p.cos, row), at(p.sin, row), p.dtype, p.rotary_dim, place);
    if (p.rotate) rotate_row_in_place<D>(x, place);
}

}  // namespace quarot
