// The pieces of the tensor-core transform: values of stage 1, layout of X, the constant block of H_32.
#pragma once

#include <type_traits>

#include "device/vec8.cuh"
#include "hadamard/silu.cuh"
#include "hadamard/sm90/warp_mma.cuh"

namespace quarot::sm90 {

template <typename Element>
__device__ __forceinline__ void unpack8(const uint4& raw, float (&v)[8]) { Vec8<Element>{{raw}}.unpack(v); }

template <typename Element>
__device__ __forceinline__ std::uint32_t pack2(float lo, float hi) {
    if constexpr (std::is_same_v<Element, __half>) return pack_half2(lo, hi);
    const __nv_bfloat162 b = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const std::uint32_t*>(&b);
}

// A small integer in both halves of a word.
__device__ __forceinline__ unsigned pair16(float x) {
    const unsigned low = static_cast<unsigned>(static_cast<int>(x)) & 0xffffu;
    return low | low << 16;
}

// Butterflies over the chunks of one lane: p[2 h + e] starts 64 h + 32 e elements after p[0].
template <int CHUNKS>
__device__ __forceinline__ void butterflies(float (&p)[CHUNKS][8]) {
#pragma unroll
    for (int bit = 1; bit < CHUNKS; bit *= 2)
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (!(i & bit))
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float a = p[i][j], b = p[i | bit][j];
                    p[i][j] = a + b, p[i | bit][j] = a - b;
                }
}

// The lane, read anew where it is asked for.
__device__ __forceinline__ int lane_id() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// Where 16-byte chunk c of row m of X lies in its 128 bytes: the 8 rows of an ldmatrix hit different banks, and so do
// the two rows that 8 neighbouring lanes of stage 1 write.
__device__ __forceinline__ int swizzle(int m, int c) { return (c ^ ((m & 1) << 2 | (m >> 1 & 3))) << 4; }

__device__ __forceinline__ std::uint32_t as_word(__half2 h) { return *reinterpret_cast<const std::uint32_t*>(&h); }

// The larger of two non-negative halves, as fp32 bits.
template <typename Element>
__device__ __forceinline__ unsigned largest_half(std::uint32_t pair) {
    const uint4 raw{pair, 0, 0, 0};
    float v[8];
    unpack8<Element>(raw, v);
    return __float_as_uint(fmaxf(v[0], v[1]));
}

// Largest of `peak` and |a b|, each in two 16-bit halves.
template <typename Element>
__device__ __forceinline__ std::uint32_t max_abs_product(std::uint32_t peak, std::uint32_t a, std::uint32_t b) {
    using Pair = std::conditional_t<std::is_same_v<Element, __half>, __half2, __nv_bfloat162>;
    const auto pair = [](std::uint32_t w) { return *reinterpret_cast<const Pair*>(&w); };
    const Pair top = __hmax2(pair(peak), __habs2(__hmul2(pair(a), pair(b))));
    return *reinterpret_cast<const std::uint32_t*>(&top);
}

// p[0..7] of one chunk: the input, or silu(gate) * up.
template <typename Element, bool kSilu>
__device__ __forceinline__ void exact_values(const uint4& first, const uint4& second, float (&p)[8]) {
    unpack8<Element>(first, p);
    if constexpr (kSilu) {
        float up[8];
        unpack8<Element>(second, up);
#pragma unroll
        for (int j = 0; j < 8; ++j) p[j] = __fmul_rn(silu_exact(p[j]), up[j]);  // not contracted with what follows
    }
}

// The same with tanh.approx, good for rows in which `products` (the largest |gate * up|) does not tower above the
// results.
template <typename Element, bool kSilu>
__device__ __forceinline__ void fast_values(const uint4& first, const uint4& second, float (&p)[8],
                                            std::uint32_t& products) {
    unpack8<Element>(first, p);
    if constexpr (kSilu) {
        float up[8];
        unpack8<Element>(second, up);
#pragma unroll
        for (int j = 0; j < 8; ++j) p[j] = silu_tanh_times(p[j], up[j]);
        products = max_abs_product<Element>(products, first.x, second.x);
        products = max_abs_product<Element>(products, first.y, second.y);
        products = max_abs_product<Element>(products, first.z, second.z);
        products = max_abs_product<Element>(products, first.w, second.w);
    }
}

__device__ __forceinline__ void store_shared(std::uint32_t address, const std::uint32_t (&w)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
}

__device__ __forceinline__ void store_shared(std::uint32_t address, std::uint32_t word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ uint4 load_shared(std::uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

// Warp w of a warpgroup multiplies by rows 16 (w & 1) + rho(r) of H_32; columns 16 s + k are step s. As
// (16 w + rho) & (16 s + k) = 16 (w & s) + (rho & k), each of these blocks is +- the block of H_16 below: the A
// fragment of mma.m16n8k16. rho orders the rows so that after transpose8x8 each lane holds consecutive output columns.
template <bool kCodes>
__device__ __forceinline__ void h16_fragment(int lane, std::uint32_t magnitude, std::uint32_t (&a)[4]) {
    const int g = lane >> 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // i & 1: rows + 8, i & 2: columns + 8
        const int rho = kCodes ? 2 * g + (i & 1) : 4 * (g >> 1) + (g & 1) + 2 * (i & 1);
        const int k = 2 * (lane & 3) + 4 * (i & 2);
        const std::uint32_t lo = __popc(rho & k) & 1, hi = __popc(rho & (k + 1)) & 1;
        a[i] = (magnitude | magnitude << 16) ^ (lo << 15 | hi << 31);
    }
}

}  // namespace quarot::sm90
