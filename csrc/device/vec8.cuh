// Eight consecutive elements of a row: the unit that one thread loads, keeps and stores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace quarot {

template <typename T>
__device__ __forceinline__ float to_float(T x) { return static_cast<float>(x); }

// As loaded: half the registers of fp32 for the 16-bit types, and no conversion that would wait for the load.
template <typename T>
struct Vec8 {
    uint4 raw[sizeof(T) / 2];

    __device__ __forceinline__ void unpack(float (&v)[8]) const {
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                v[4 * i] = __uint_as_float(raw[i].x), v[4 * i + 1] = __uint_as_float(raw[i].y);
                v[4 * i + 2] = __uint_as_float(raw[i].z), v[4 * i + 3] = __uint_as_float(raw[i].w);
            }
        } else {
            const unsigned w[4] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if constexpr (std::is_same_v<T, __half>) {
                    const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&w[i]));
                    v[2 * i] = f.x, v[2 * i + 1] = f.y;
                } else {
                    v[2 * i] = __uint_as_float(w[i] << 16), v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
                }
            }
        }
    }

    // Rounds to T.
    __device__ __forceinline__ void pack(const float (&v)[8]) {
        unsigned w[2 * sizeof(T)];
#pragma unroll
        for (int i = 0; i < 2 * sizeof(T); ++i) {
            if constexpr (sizeof(T) == 4) {
                w[i] = __float_as_uint(v[i]);
            } else if constexpr (std::is_same_v<T, __half>) {
                const __half2 h = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
                w[i] = *reinterpret_cast<const unsigned*>(&h);
            } else {
                const __nv_bfloat162 b = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
                w[i] = *reinterpret_cast<const unsigned*>(&b);
            }
        }
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i)
            raw[i] = make_uint4(w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]);
    }
};

// Elements column .. column + 7 of a row of k, zero beyond. 16-byte aligned and k a multiple of 8.
template <typename T>
__device__ __forceinline__ Vec8<T> load8(const T* row, int column, int k) {
    Vec8<T> out{};
    if (column < k) {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i)
            out.raw[i] = reinterpret_cast<const uint4*>(row + column)[i];
    }
    return out;
}

// The same for any alignment and k, as floats, element by element.
template <typename T>
__device__ __forceinline__ void load8_any(const T* row, int column, int k, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = column + i < k ? to_float(row[column + i]) : 0.0f;
}

template <typename T>
__device__ __forceinline__ void store8(T* row, int column, const Vec8<T>& v) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) reinterpret_cast<uint4*>(row + column)[i] = v.raw[i];
}

template <typename T>
__device__ __forceinline__ void store8_any(T* row, int column, int k, const float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (column + i < k) row[column + i] = static_cast<T>(v[i]);
}

}  // namespace quarot
