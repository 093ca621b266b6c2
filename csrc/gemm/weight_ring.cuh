// Weights on their way to a warp while its block waits for the kernel before and makes its codes.
//
// Registers hold the first item (the weights of a strip and a chunk); the copy engine brings the next ones into shared memory,
// where they cost neither registers nor L1.
#pragma once

#include "device/async_copy.cuh"
#include "gemm/skinny.h"

namespace quarot::skinny {

/// The items of a warp in the order of its products: all strips of the block, then the next chunk that is its own.
struct ItemCursor {
    int strip, unit;

    __device__ __forceinline__ void advance(int strip_count, int unit_step) {
        if (++strip >= strip_count) strip = 0, unit += unit_step;
    }
};

template <class Weights, int UNITS, int WARPS>
class WeightRing {
    static constexpr int kItemBytes = UNITS * Weights::kUnitBytes, kBarrierBytes = 8;

   public:
    static constexpr int kMostSlots = WARPS <= 16 ? 3 : 2;  // of 32 KB, or 64 KB (not timed)

    /// Of a block, in shared memory from a multiple of 128 on.
    static constexpr int bytes(int slots) { return WARPS * slots * (kItemBytes + kBarrierBytes); }

    /// Asks for the warp's first items but one, `last`, which has been asked for otherwise: and before, for setting up the
    /// barriers takes half a microsecond.
    __device__ __forceinline__ WeightRing(uint32_t shared, int slots, SkinnyProblem const& p, int strip_begin,
                                          int strip_count, int units, ItemCursor last)
        : p_(p), strip_begin_(strip_begin), strip_count_(strip_count), units_(units), slots_(slots), last_(last) {
        int const warp = threadIdx.x / 32;
        begin_ = shared + warp * slots * kItemBytes;
        barriers_ = shared + WARPS * slots * kItemBytes + warp * slots * kBarrierBytes;
        if (threadIdx.x % 32 == 0) {
#pragma unroll 1
            for (int i = 0; i < slots; ++i) mbarrier_init(barriers_ + i * kBarrierBytes, 1);
            mbarrier_init_fence();
        }
        __syncwarp();
#pragma unroll 1
        for (int slot = 0; slot + 1 < slots; ++slot) fill(slot);
    }

    /// One slot is left for when the codes are made: what the prologue reads waits behind what has been asked for.
    __device__ __forceinline__ void fill_last() { fill(slots_ - 1); }

    /// The next item, of `atoms` 32-column atoms, and a request for another in its place. The whole warp calls it.
    __device__ __forceinline__ void take(uint32_t (&w)[UNITS][Weights::kRegisters], int atoms) {
        mbarrier_wait(barriers_ + next_ * kBarrierBytes, parity_);
        Weights::template load_shared<UNITS>(w, begin_ + next_ * kItemBytes, atoms, threadIdx.x % 32);
        __syncwarp();  // everybody has read it
        fill(next_);
        if (++next_ == slots_) next_ = 0, parity_ ^= 1;
    }

   private:
    __device__ __forceinline__ void fill(int slot) {
        last_.advance(strip_count_, WARPS * UNITS);
        if (threadIdx.x % 32 != 0 || last_.unit >= units_) return;
        int const bytes = min(2 * UNITS, p_.k / 32 - 2 * last_.unit) * (Weights::kUnitBytes / 2);
        char const* const source = Weights::lane_pointer(p_.weight, strip_begin_ + last_.strip, p_.k, p_.n, 0) +
                                   last_.unit * Weights::kUnitBytes;
        mbarrier_expect(barriers_ + slot * kBarrierBytes, bytes);
        bulk_load(begin_ + slot * kItemBytes, source, bytes, barriers_ + slot * kBarrierBytes);
    }

    SkinnyProblem const& p_;
    int const strip_begin_, strip_count_, units_, slots_;
    uint32_t begin_, barriers_;
    ItemCursor last_;  // asked for
    int next_ = 0, parity_ = 0;
};

/// Where weights come straight from global memory.
struct NoRing {
    __device__ __forceinline__ NoRing(uint32_t, int, SkinnyProblem const&, int, int, int, ItemCursor) {}
};

}  // namespace quarot::skinny
