// wgmma with int8 operands, weights in registers, for kernels that drive it themselves (CUTLASS has its own layers).
#pragma once

#include "cute/arch/mma_sm90_gmma.hpp"

#include <cstdint>
#include <utility>

namespace quarot::sm90 {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

/// Returns when at most `IN_FLIGHT` committed groups are not complete.
template <int IN_FLIGHT>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(IN_FLIGHT) : "memory");
}

/// The compiler moves no use of these registers across this point. It knows nothing of an instruction that writes them
/// later, so every read of a result stands behind `wgmma_wait` and this.
template <int N>
__device__ __forceinline__ void pin(uint32_t (&registers)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

/// Descriptor of a K-major operand in shared memory whose rows are ROW_BYTES = 64 or 128, swizzled over their length.
/// A step of 32 bytes along K adds 2.
template <int ROW_BYTES>
__device__ __forceinline__ uint64_t swizzled_rows(uint32_t shared_address) {
    static_assert(ROW_BYTES == 64 || ROW_BYTES == 128, "swizzles that exist");
    constexpr uint64_t kEightRows = 8 * ROW_BYTES / 16, kSwizzle = ROW_BYTES == 128 ? 1 : 2;
    return kSwizzle << 62 | kEightRows << 32 | uint64_t(1) << 16 | (shared_address & 0x3FFFF) >> 4;
}

template <int TOKENS>
struct WgmmaOf;
template <>
struct WgmmaOf<16> {
    using Type = cute::SM90::GMMA::MMA_64x16x32_S32S8S8_RS_TN;
};
template <>
struct WgmmaOf<32> {
    using Type = cute::SM90::GMMA::MMA_64x32x32_S32S8S8_RS_TN;
};
template <>
struct WgmmaOf<64> {
    using Type = cute::SM90::GMMA::MMA_64x64x32_S32S8S8_RS_TN;
};
template <>
struct WgmmaOf<128> {
    using Type = cute::SM90::GMMA::MMA_64x128x32_S32S8S8_RS_TN;
};
template <>
struct WgmmaOf<256> {
    using Type = cute::SM90::GMMA::MMA_64x256x32_S32S8S8_RS_TN;
};

/// acc = (or, with `add`, +=) a[64 x 32] * b[TOKENS x 32]^T, int32. Asynchronous: see `wgmma_wait`.
///
/// Lane l of warp w has in acc[4j + {0, 1}] row 16w + l/4, columns 8j + 2(l mod 4) + {0, 1}, in acc[4j + {2, 3}] row + 8.
template <int N, int... I>
__device__ __forceinline__ void wgmma(uint32_t (&acc)[N], uint32_t const (&a)[4], uint64_t b, bool add,
                                      std::integer_sequence<int, I...>) {
    WgmmaOf<2 * N>::Type::fma(a[0], a[1], a[2], a[3], b, acc[I]...,
                              add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}
template <int N>
__device__ __forceinline__ void wgmma(uint32_t (&acc)[N], uint32_t const (&a)[4], uint64_t b, bool add) {
    wgmma(acc, a, b, add, std::make_integer_sequence<int, N>{});
}

}  // namespace quarot::sm90
