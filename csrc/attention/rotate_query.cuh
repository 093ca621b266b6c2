// R3 on the queries of a tile: y = (H_order x H_pow2) q / sqrt(D) in float32, rounded once to fp16 or bf16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/dtype.h"

namespace quarot {

__device__ __forceinline__ float load_as_float(const void* x, DType dtype, int i) {
    if (dtype == DType::kFloat32) return static_cast<const float*>(x)[i];
    if (dtype == DType::kFloat16) return __half2float(static_cast<const __half*>(x)[i]);
    return __bfloat162float(static_cast<const __nv_bfloat16*>(x)[i]);
}

// Rotates `row` [order * pow2] in shared memory in place by one warp; `scratch` [order * pow2] when order > 1.
// The order of the sums is that of quarot/ops/kv_append.py:rotate_heads, so results are bit-equal to it.
__device__ __forceinline__ void rotate_row(float* row, float* scratch, const std::int8_t* signs, int order, int pow2,
                                           int lane) {
    const int dims = order * pow2;
    __syncwarp();
    for (int distance = 1; distance < pow2; distance *= 2) {
        for (int i = lane; i < dims / 2; i += 32) {
            const int low = (i / distance) * 2 * distance + i % distance;
            const float a = row[low], b = row[low + distance];
            row[low] = a + b, row[low + distance] = a - b;
        }
        __syncwarp();
    }
    const float scale = static_cast<float>(1.0 / sqrt(static_cast<double>(dims)));
    if (order > 1) {
        for (int i = lane; i < dims; i += 32) {
            const int run = i / pow2, place = i % pow2;
            float total = signs[run * order] * row[place];
            for (int j = 1; j < order; ++j) total += signs[run * order + j] * row[j * pow2 + place];
            scratch[i] = total;
        }
        __syncwarp();
        for (int i = lane; i < dims; i += 32) row[i] = scratch[i] * scale;
    } else {
        for (int i = lane; i < dims; i += 32) row[i] *= scale;
    }
    __syncwarp();
}

// Power-of-two D: the same sums in registers, lane holds dims D/32 * lane .. ; returns them rotated and scaled.
template <int D>
__device__ __forceinline__ void rotate_registers(float (&x)[D / 32], int lane) {
    constexpr int kPer = D / 32;
#pragma unroll
    for (int distance = 1; distance < kPer; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
            if (i & distance) continue;
            const float a = x[i], b = x[i + distance];
            x[i] = a + b, x[i + distance] = a - b;
        }
    }
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kPer; ++i) {
            const float other = __shfl_xor_sync(0xffffffffu, x[i], distance);
            x[i] = lane & distance ? other - x[i] : x[i] + other;
        }
    }
    const float scale = static_cast<float>(1.0 / sqrt(static_cast<double>(D)));
#pragma unroll
    for (int i = 0; i < kPer; ++i) x[i] *= scale;
}

}  // namespace quarot
