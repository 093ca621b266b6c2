// Thread block clusters (Hopper): barrier, and stores into the shared memory of another CTA.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace quarot {

// Counts the thread in without ordering its memory accesses: all CTAs of the cluster have started once cluster_wait returns.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// Makes mbarriers initialised by this thread usable by the cluster, once both sides have passed its barrier.
__device__ __forceinline__ void fence_mbarrier_init() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Stores into the shared memory of CTA `rank` of the cluster, at the place that `address` has in one's own, and counts the
// 8 bytes at its mbarrier: no fence, no barrier of the whole cluster (whose release would wait for all memory).
__device__ __forceinline__ void store_remote(std::uint32_t address, std::uint32_t mbarrier, int rank, float2 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .b32 data, count;\nmapa.shared::cluster.u32 data, %0, %2;\nmapa.shared::cluster.u32 count, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [data], {%3, %4}, [count];\n}" ::"r"(address),
        "r"(mbarrier), "r"(rank), "f"(x.x), "f"(x.y)
        : "memory");
#endif
}

// The same with 16 bytes.
__device__ __forceinline__ void store_remote(std::uint32_t address, std::uint32_t mbarrier, int rank, uint4 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .b32 data, count;\nmapa.shared::cluster.u32 data, %0, %2;\nmapa.shared::cluster.u32 count, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [data], {%3, %4, %5, %6}, [count];\n}" ::"r"(address),
        "r"(mbarrier), "r"(rank), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
        : "memory");
#endif
}

// One arrival at an mbarrier of this CTA that awaits `bytes` by store_remote.
__device__ __forceinline__ void expect_remote(std::uint32_t mbarrier, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes) : "memory");
#endif
}

// Waits for phase 0 of it: all bytes have arrived and are visible.
__device__ __forceinline__ void wait_remote(std::uint32_t mbarrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
        "@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(mbarrier)
        : "memory");
#endif
}

}  // namespace quarot
