// The transform across heads as matrix products: Y[h][i] = sum over h' of H[h][h'] X[h'][i] by mma.m16n8k16, with X as it
// came (fp16 and bf16 operands and +-1 are exact, so only the fp32 sums round).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace quarot::heads {

inline constexpr int kMaxHeads = 64, kMaxHeadDim = 256;

// 16-head tiles of a transform (3 spill).
constexpr int tiles(int heads) { return heads <= 32 ? 2 : 4; }

// Bytes from head to head of X in shared memory: eight rows of an ldmatrix lie in different banks.
__host__ __device__ constexpr int pitch(int head_dim) { return 2 * head_dim + 16; }

template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
#define QUAROT_MMA(TYPE)                                                                                              \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "   \
                 "{%8, %9}, {%0, %1, %2, %3};"                                                                       \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if constexpr (std::is_same_v<T, __half>)
        QUAROT_MMA("f16");
    else
        QUAROT_MMA("bf16");
#undef QUAROT_MMA
}

__device__ __forceinline__ void ldmatrix4_transposed(std::uint32_t (&r)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The A fragment of k tile q, from a word of the sign table (heads.h).
template <typename T>
__device__ __forceinline__ void sign_fragment(std::uint32_t (&h)[4], std::uint32_t word, int q) {
    constexpr std::uint32_t kOne = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;
#pragma unroll
    for (int i = 0; i < 4; ++i) h[i] = (word << (4 * q + i) & 0x80008000u) ^ kOne;
}

}  // namespace quarot::heads
