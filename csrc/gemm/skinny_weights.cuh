// How weights come to the few-token kernels: both formats, from memory to operands of mma.sync, and the instructions for it.
#pragma once

#include "gemm/skinny.h"

namespace quarot::skinny {

constexpr int kUnit = 64;       // K of one work unit: two int4 atoms

__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void copy_16_bytes(uint32_t shared_address, void const* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address), "l"(global) : "memory");
}

/// Through L1, where a second block of the same SM finds the line again.
__device__ __forceinline__ void copy_16_bytes_l1(uint32_t shared_address, void const* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address), "l"(global) : "memory");
}

__device__ __forceinline__ void copy_4_bytes(void* shared, void const* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))),
                 "l"(global)
                 : "memory");
}

__device__ __forceinline__ void mma(int (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Packed int4 tiles. A unit is two 256-byte atoms; the values enter the MMA as 16*w (the nibble stays in the high
/// half).
struct Int4Tiles {
    static constexpr float kMultiplier = 0.0625f;           // undoes the 16: exact
    static constexpr int kRegisters = 4;                    // of one lane for one unit
    static constexpr int kUnitBytes = 512;                  // from unit to unit of a strip
    static constexpr int kRowPad(int k) { return k + 16; }  // odd multiple of 16 bytes: ldmatrix reads hit all banks

    static __device__ char const* lane_pointer(void const* weight, int strip, int k, int, int lane) {
        return static_cast<char const*>(weight) + uint64_t(uint32_t(strip)) * uint32_t(8 * k) + lane * 8;
    }
    /// All units of an item in shared memory; atoms at or past `atoms` come back as zero.
    template <int UNITS>
    static __device__ void load_shared(uint32_t (&r)[UNITS][4], uint32_t item, int atoms, int lane) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            uint32_t const p = item + u * kUnitBytes + lane * 8;
            load_shared_8(r[u][0], r[u][1], p);
            load_shared_8(r[u][2], r[u][3], p + 256);
        }
        if (atoms >= 2 * UNITS) return;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            if (2 * u >= atoms) r[u][0] = r[u][1] = 0;
            if (2 * u + 1 >= atoms) r[u][2] = r[u][3] = 0;
        }
    }
    static __device__ void load_shared_8(uint32_t& x, uint32_t& y, uint32_t p) {
        asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x), "=r"(y) : "r"(p) : "memory");
    }
    /// All units of a whole item.
    template <int UNITS>
    static __device__ void load_whole(uint32_t (&r)[UNITS][4], char const* item) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u)
#pragma unroll
            for (int atom = 0; atom < 2; ++atom)
                asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.b32 {%0,%1}, [%2];"
                             : "=r"(r[u][2 * atom]), "=r"(r[u][2 * atom + 1])
                             : "l"(item + u * kUnitBytes + atom * 256));
    }
    /// Reads unit `u` of an item; atoms at or past `atoms` (of the item) come back as zero.
    static __device__ void load(uint32_t (&r)[4], char const* item, int u, int atoms, int) {
        char const* p = item + u * kUnitBytes;
        r[0] = r[1] = r[2] = r[3] = 0;
        if (2 * u < atoms) load_8(r[0], r[1], p);
        if (2 * u + 1 < atoms) load_8(r[2], r[3], p + 256);
    }
    static __device__ void load_8(uint32_t& x, uint32_t& y, char const* p) {
        // Streamed once: keep it out of L1, and let DRAM pages be read in 256-byte steps.
        asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v2.b32 {%0,%1}, [%2];" : "+r"(x), "+r"(y) : "l"(p));
    }
    static __device__ void fragment(uint32_t (&a)[4], uint32_t const (&r)[4], int half) {
        uint32_t const x = r[2 * half], y = r[2 * half + 1];
        a[0] = (x << 4) & 0xF0F0F0F0u;
        a[1] = x & 0xF0F0F0F0u;
        a[2] = (y << 4) & 0xF0F0F0F0u;
        a[3] = y & 0xF0F0F0F0u;
    }
    /// Activation fragments of a unit for 8 tokens: b[0..1] for the first atom, b[2..3] for the second.
    static __device__ uint32_t activation_address(uint32_t base, int row, int stride, int lane) {
        return base + row * stride + (lane / 8) * 16;
    }
    static __device__ void activations(uint32_t (&b)[4], uint32_t address) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(address)
                     : "memory");
    }
    static __device__ int activation_row(int lane) { return lane % 8; }
};

/// Row-major int8. Lane (row, quad) holds 16 consecutive k of its rows; the activations use the same order, so the
/// MMA's own order of k does not matter.
struct Int8Rows {
    static constexpr float kMultiplier = 1.0f;
    static constexpr int kRegisters = 8;
    static constexpr int kUnitBytes = kUnit;
    static constexpr int kRowPad(int k) { return (k + 127) / 128 * 128 + 64; }  // two rows fill the 32 banks

    static __device__ char const* lane_pointer(void const* weight, int strip, int k, int n, int lane) {
        int const row = min(strip * 16 + lane / 4, n - 1);  // rows past the end repeat the last one and are not stored
        return static_cast<char const*>(weight) + size_t(row) * k + (lane % 4) * 16;
    }
    static __device__ void load(uint32_t (&r)[8], char const* item, int u, int atoms, int row8_offset) {
        char const* p = item + u * kUnitBytes;
        r[0] = r[1] = r[2] = r[3] = r[4] = r[5] = r[6] = r[7] = 0;
        if (int(threadIdx.x % 4) / 2 < atoms - 2 * u) {
            load_16(r, p);
            load_16(r + 4, p + row8_offset);
        }
    }
    static __device__ void load_16(uint32_t* r, char const* p) {
        asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])
                     : "l"(p));
    }
    static __device__ void fragment(uint32_t (&a)[4], uint32_t const (&r)[8], int half) {
        a[0] = r[2 * half];
        a[1] = r[4 + 2 * half];
        a[2] = r[2 * half + 1];
        a[3] = r[4 + 2 * half + 1];
    }
    static __device__ uint32_t activation_address(uint32_t base, int row, int stride, int lane) {
        return base + row * stride + (lane % 4) * 16;
    }
    static __device__ void activations(uint32_t (&b)[4], uint32_t address) {
        asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                     : "r"(address)
                     : "memory");
    }
    static __device__ int activation_row(int lane) { return lane / 4; }
};

}  // namespace quarot::skinny
