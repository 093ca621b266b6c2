// Eight consecutive elements of a row: the unit that one thread loads, holds as fp32 and stores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace quarot {

template <typename T>
__device__ __forceinline__ float to_float(T x) { return static_cast<float>(x); }

// v[i] = x[i] for i < valid, 0 beyond. `aligned`: x is 16-byte aligned (uniform over the grid).
template <typename T>
__device__ __forceinline__ void load8(const T* x, int valid, bool aligned, float (&v)[8]) {
    if (aligned && valid >= 8) {
        if constexpr (sizeof(T) == 4) {
            const float4 a = reinterpret_cast<const float4*>(x)[0], b = reinterpret_cast<const float4*>(x)[1];
            v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
        } else {
            const uint4 raw = *reinterpret_cast<const uint4*>(x);
            const T* e = reinterpret_cast<const T*>(&raw);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = to_float(e[i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = i < valid ? to_float(x[i]) : 0.0f;
    }
}

template <typename T>
__device__ __forceinline__ void store8(T* y, int valid, bool aligned, const float (&v)[8]) {
    if (aligned && valid >= 8) {
        if constexpr (sizeof(T) == 4) {
            reinterpret_cast<float4*>(y)[0] = make_float4(v[0], v[1], v[2], v[3]);
            reinterpret_cast<float4*>(y)[1] = make_float4(v[4], v[5], v[6], v[7]);
        } else {
            uint4 raw;
            T* e = reinterpret_cast<T*>(&raw);
#pragma unroll
            for (int i = 0; i < 8; ++i) e[i] = static_cast<T>(v[i]);
            *reinterpret_cast<uint4*>(y) = raw;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < valid) y[i] = static_cast<T>(v[i]);
    }
}

}  // namespace quarot
