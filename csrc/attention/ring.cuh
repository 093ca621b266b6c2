// A warp's private ring of stages in shared memory: the warp is its own producer and consumer, no CTA barrier.
//
// Hopper and later: one bulk copy (TMA engine, no register staging) per stage onto an mbarrier. Earlier GPUs: cp.async by
// all lanes. Both read through L2 only, so a page written by the previous kernel is seen once that kernel is complete.
#pragma once

#include <cstdint>

namespace quarot {

#if !defined(QUAROT_FORCE_CP_ASYNC) && (!defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900)
#define QUAROT_BULK_COPY 1
#else
#define QUAROT_BULK_COPY 0
#endif

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// One arrival a phase.
__device__ __forceinline__ void init_mbarrier(std::uint32_t mbarrier) {
#if QUAROT_BULK_COPY
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(mbarrier) : "memory");
#endif
}

// Stage k of the warp lives in slot k % stages. `mbarriers` are `stages` 8-byte words.
struct Ring {
    std::uint32_t buffer, mbarriers;
    int stages, stage_bytes;
#if QUAROT_BULK_COPY
    std::uint64_t policy;
#endif

    __device__ __forceinline__ Ring(std::uint8_t* buffer_, std::uint64_t* mbarriers_, int stages_, int stage_bytes_,
                                    int lane)
        : buffer(shared_address(buffer_)), mbarriers(shared_address(mbarriers_)), stages(stages_),
          stage_bytes(stage_bytes_) {
#if QUAROT_BULK_COPY
        // Every byte of the cache is read once: leave L2 to others.
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        if (lane < stages) init_mbarrier(mbarriers + 8 * lane);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
#endif
    }

    __device__ __forceinline__ void expect(int slot, int bytes, int lane) const {
#if QUAROT_BULK_COPY
        if (lane == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(mbarriers + 8 * slot), "r"(bytes)
                         : "memory");
#endif
    }

    // Copies `bytes` to `offset` of the slot. Bulk copies: by one lane; cp.async: call with all lanes, uniform arguments.
    __device__ __forceinline__ void copy(int slot, int offset, const std::uint8_t* source, int bytes, int lane) const {
        const std::uint32_t target = buffer + slot * stage_bytes + offset;
#if QUAROT_BULK_COPY
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                target),
            "l"(source), "r"(bytes), "r"(mbarriers + 8 * slot), "l"(policy)
            : "memory");
#else
        for (int i = 16 * lane; i < bytes; i += 512)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target + i), "l"(source + i) : "memory");
#endif
    }

    __device__ __forceinline__ void prefetch(const std::uint8_t* source, int bytes, int lane) const {
#if QUAROT_BULK_COPY
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes) : "memory");
#endif
    }

    // Ends the copies of a stage; every stage (also an empty one, past the end) must be committed once, in order.
    __device__ __forceinline__ void commit() const {
#if !QUAROT_BULK_COPY
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }

    // Waits until stage k has landed; stages up to k + stages - 1 have been committed.
    __device__ __forceinline__ void wait(int slot, int parity) const {
#if QUAROT_BULK_COPY
        asm volatile(
            "{\n.reg .pred done;\nWAIT:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra DONE;\nbra WAIT;\n"
            "DONE:\n}" ::"r"(mbarriers + 8 * slot),
            "r"(parity)
            : "memory");
#else
        if (stages == 1) asm volatile("cp.async.wait_group 0;" ::: "memory");
        if (stages == 2) asm volatile("cp.async.wait_group 1;" ::: "memory");
        if (stages == 3) asm volatile("cp.async.wait_group 2;" ::: "memory");
        if (stages >= 4) asm volatile("cp.async.wait_group 3;" ::: "memory");
        __syncwarp();
#endif
    }

    // The same when nothing else is outstanding.
    __device__ __forceinline__ void wait_all(int slot, int parity) const {
#if QUAROT_BULK_COPY
        wait(slot, parity);
#else
        asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
    }
};

}  // namespace quarot
