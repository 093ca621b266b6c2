// One-warp matrix instructions: loads of 8x8 fragments, m16n8k16 in fp16, transposition across lanes.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace quarot::sm90 {

// Four 8x8 matrices of 16-bit elements; lane i supplies the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix4(std::uint32_t (&r)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// d [16, 8] += a [16, 16] b [16, 8]
__device__ __forceinline__ void mma16816(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Lane 4 i + j holds elements (i, 2j), (i, 2j+1) of an 8x8 matrix; returns those of its transpose.
__device__ __forceinline__ std::uint32_t transpose8x8(std::uint32_t x) {
    std::uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ std::uint32_t pack_half2(float lo, float hi) {
    const __half2 h = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const std::uint32_t*>(&h);
}

}  // namespace quarot::sm90
