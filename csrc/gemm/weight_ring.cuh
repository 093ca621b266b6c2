// Weights on their way to a warp while its block waits for the kernel before and makes its codes, or fetches them.
//
// Registers hold the first item (the weights of a strip and a chunk); the copy engine brings the next ones into shared memory,
// where they cost neither registers nor L1.
#pragma once

#include "device/async_copy.cuh"
#include "device/reduce.cuh"
#include "gemm/skinny.h"

namespace quarot::skinny {

template <class Weights, int UNITS, int WARPS>
class WeightRing {
    static constexpr int kItemBytes = UNITS * Weights::kUnitBytes, kBarrierBytes = 8;

   public:
    static constexpr int kMostSlots = WARPS <= 16 ? 2 : 1;  // 64 KB of a block; a launch may say otherwise

    /// Of a block, in shared memory from a multiple of 128 on.
    static constexpr int bytes(int slots) { return WARPS * slots * (kItemBytes + kBarrierBytes); }

    /// Sets up the barriers, which takes half a microsecond: a warp's first item has been asked for otherwise, and before.
    __device__ __forceinline__ WeightRing(uint32_t shared, int slots, SkinnyProblem const& p, int strip_begin,
                                          int strip_count, int atoms)
        : p_(p), strip_begin_(strip_begin), strip_count_(strip_count), atoms_(atoms), slots_(slots) {
        int const warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);  // so that the compiler knows: the same in all lanes
        unit_ = warp * UNITS;
        items_ = shared + warp * slots * kItemBytes;
        barriers_ = shared + WARPS * slots * kItemBytes + warp * slots * kBarrierBytes;
        if (elect_one()) {
#pragma unroll 1
            for (int i = 0; i < slots; ++i) mbarrier_init(barriers_ + i * kBarrierBytes, 1);
            mbarrier_init_fence();
        }
        __syncwarp();
    }

    /// Asks for the items behind the first one: once what the prologue reads has been asked for, which would wait behind them.
    __device__ __forceinline__ void fill() {
#pragma unroll 1
        for (int slot = 0; slot < slots_; ++slot) request(slot);
    }

    /// The next item, of `atoms` 32-column atoms, and a request for another one in its place. The whole warp calls it.
    __device__ __forceinline__ void take(uint32_t (&w)[UNITS][Weights::kRegisters], int atoms) {
        mbarrier_wait(barriers_ + slot_ * kBarrierBytes, parity_);
        Weights::template load_shared<UNITS>(w, items_ + slot_ * kItemBytes, atoms, threadIdx.x % 32);
        __syncwarp();  // everybody has read it
        request(slot_);
        if (++slot_ == slots_) slot_ = 0, parity_ ^= 1;
    }

   private:
    /// Items come in the order of the products: all strips of the block, then the next chunk that is the warp's own.
    __device__ __forceinline__ void request(int slot) {
        if (++strip_ == strip_count_) strip_ = 0, unit_ += WARPS * UNITS;
        if (2 * unit_ >= atoms_ || !elect_one()) return;
        int const bytes = min(2 * UNITS, atoms_ - 2 * unit_) * (Weights::kUnitBytes / 2);
        char const* const source = Weights::lane_pointer(p_.weight, strip_begin_ + strip_, p_.k, p_.n, 0) +
                                   unit_ * Weights::kUnitBytes;
        mbarrier_expect(barriers_ + slot * kBarrierBytes, bytes);
        bulk_load(items_ + slot * kItemBytes, source, bytes, barriers_ + slot * kBarrierBytes);
    }

    SkinnyProblem const& p_;
    int const strip_begin_, strip_count_, atoms_, slots_;
    uint32_t items_, barriers_;
    int strip_ = 0, unit_;         // asked for last
    int slot_ = 0, parity_ = 0;    // of the next item
};

/// Where weights come straight from global memory.
struct NoRing {
    __device__ __forceinline__ NoRing(uint32_t, int, SkinnyProblem const&, int, int, int) {}
    __device__ __forceinline__ void fill() {}
};

}  // namespace quarot::skinny
