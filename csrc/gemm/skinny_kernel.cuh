// The kernel behind skinny.h. Weights go from global memory straight into mma.sync operands; nothing but int32 partial
// sums and the activations passes through shared memory. See NOTES.md for the design and the measurements.
#pragma once

#include "device/made_by_now.cuh"
#include "device/vec8.cuh"
#include "gemm/skinny.h"
#include "gemm/weight_ring.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace quarot::skinny {

constexpr int kUnit = 64;       // K of one work unit: two int4 atoms
constexpr int kAccStride = 20;  // int32 words from token to token: 16 rows, padded so that fragment adds hit 32 banks

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

__device__ __forceinline__ void store(void* out, size_t index, float value, OutputType type) {
    if (type == OutputType::kFloat16)
        static_cast<__half*>(out)[index] = __float2half_rn(value);
    else if (type == OutputType::kBFloat16)
        static_cast<__nv_bfloat16*>(out)[index] = __float2bfloat16_rn(value);
    else
        static_cast<float*>(out)[index] = value;
}

/// The launch geometry, computed once on the host.
struct Geometry {
    int strips_each, strips_over;  // of every block, and blocks that own one more: the first ones
    int units;                     // 64-wide units of K, the last may be half
    int strips_max;                // most strips any block owns
    int ring, ring_slots;          // of a made input: where its WeightRing begins in shared memory, slots of each warp
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kBulkCopies = true;
#else
constexpr bool kBulkCopies = false;
#endif

/// Activation codes in global memory, read chunk by chunk. The other inputs (prologue_*.cuh) make the codes in shared
/// memory before the first product (`kMade`) and say how they lie there: row r of chunk i begins at i * chunk_stride +
/// r * row_stride, its unit u unit_offset(u) bytes further on. code_bytes: of shared memory for so many rows. begin() runs
/// ahead of the wait; make() behind it, and calls `meanwhile` as soon as it has asked for its (first) rows.
struct StoredCodes {
    static constexpr bool kMade = false, kOneChunk = false;
    static constexpr bool kOneRow = false;  // compiled for m = 1
    static constexpr bool kAdds = false;    // the problem's residual to the output
    using Output = float;                   // of a made input: the type of the output; else the problem says it
    struct Arguments {};
    struct Early {};  // what a made input reads ahead of the wait: constants only
    template <class Layout, int WARPS>
    static __host__ __device__ constexpr int row_stride() { return Layout::kRowBytes; }
    template <class Layout>
    static __host__ __device__ constexpr int chunk_stride() { return 0; }  // a warp has one at a time
    static __host__ __device__ constexpr int unit_offset(int u) { return u * kUnit; }
    template <class Layout, int WARPS>
    static __host__ __device__ constexpr int code_bytes(int) { return WARPS * Layout::kTileBytes; }
};

/// Made by the warps that use them: one chunk a warp, the chunks of a row side by side.
struct MadeChunks : StoredCodes {
    static constexpr bool kMade = true, kOneChunk = true;
    template <class Layout, int WARPS>
    static __host__ __device__ constexpr int row_stride() { return WARPS * Layout::kRowBytes + 16; }  // 16: other banks
    template <class Layout>
    static __host__ __device__ constexpr int chunk_stride() { return Layout::kRowBytes; }
    template <class Layout, int WARPS>
    static __host__ __device__ constexpr int code_bytes(int rows) { return rows * row_stride<Layout, WARPS>(); }
};

/// Shared memory of a block, in bytes; the host asks for total(), the kernel lays it out in this order.
template <class Weights, class Input, int TOKEN_TILES, int UNITS>
struct SharedLayout {
    static constexpr int kTokens = TOKEN_TILES * 8;
    static constexpr int kChunk = UNITS * kUnit;
    static constexpr int kRowBytes = Weights::kRowPad(kChunk);
    // A warp's activations: kTokens rows of one chunk. 16: tiles side by side begin in different banks.
    static constexpr int kTileBytes = kTokens * kRowBytes + 16;
    static constexpr int kStripSums = (Input::kOneRow ? 1 : kTokens) * kAccStride;  // int32 words
    __host__ __device__ static constexpr int sums(int strips) { return strips * kStripSums * 4; }
    __host__ __device__ static constexpr int total(int code_bytes, int strips) {
        int const floats = 2 * strips * 16 + kTokens;  // channel scales, biases, token scales
        return (code_bytes + sums(strips) + floats * 4 + 127) / 128 * 128;
    }
};

/// Of one row: what becomes of the sum of a channel, in registers long before the sum is there. A channel at or past the
/// problem's n is none.
template <typename T>
struct OneOutput {
    int n;
    float scale = 0.0f, bias = -0.0f;  // adding -0 changes nothing
    T added = T(-0.0f);

    /// Constants, which may be read ahead of the wait.
    __device__ __forceinline__ OneOutput(SkinnyProblem const& p, int n) : n(n) {
        if (n >= p.n) return;
        scale = p.weight_scale[n];
        if (p.bias != nullptr) bias = p.bias[n];
    }
    __device__ __forceinline__ void load_residual(SkinnyProblem const& p) {
        if (p.residual != nullptr && n < p.n) added = static_cast<T const*>(p.residual)[n];
    }
    /// The residual is added to the rounded output, as a kernel that adds afterwards would.
    __device__ __forceinline__ void store(SkinnyProblem const& p, float sum, float token_scale) const {
        if (n >= p.n) return;
        T const value = static_cast<T>(__fadd_rn(__fmul_rn(__fmul_rn(sum, token_scale), scale), bias));
        static_cast<T*>(p.out)[n] = static_cast<T>(__fadd_rn(to_float(value), to_float(added)));
    }
};

/// Blocks own equal shares of the 16-row strips; blockIdx.y is the token block.
///
/// A warp takes every WARPS-th chunk of K. It copies the chunk's activations to its own corner of shared memory (or the
/// block makes them there: Input), turns them into register fragments once, and streams the chunk's weights of all
/// strips past them: no block-wide barrier until the end.
///
/// With a made input, most instructions run once, and each line of them comes from L2 (NOTES.md): so no more of them than it
/// takes, above all between the wait and the last store.
template <class Weights, class Input, int TOKEN_TILES, int UNITS, int WARPS, int BLOCKS>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    skinny_kernel(SkinnyProblem const p, typename Input::Arguments const input, Geometry const g) {
    using Layout = SharedLayout<Weights, Input, TOKEN_TILES, UNITS>;
    constexpr int kTokens = Layout::kTokens, kThreads = WARPS * 32;
    extern __shared__ __align__(128) char shared[];
    int const code_bytes = Input::template code_bytes<Layout, WARPS>(Input::kOneRow ? 1 : p.m);
    int* const acc = reinterpret_cast<int*>(shared + code_bytes);  // [strips_max][kTokens, or 1][kAccStride]
    float* const channel_scale = reinterpret_cast<float*>(shared + code_bytes + Layout::sums(g.strips_max));
    float* const channel_bias = channel_scale + g.strips_max * 16;
    float* const token_scale = channel_bias + g.strips_max * 16;
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    int const owner = blockIdx.x;
    int const strip_begin = owner * g.strips_each + min(owner, g.strips_over);
    int const strip_count = g.strips_each + (owner < g.strips_over);
    int unit = warp * UNITS;                    // this warp's next chunk
    int const atoms = int(unsigned(p.k) / 32);  // 32-wide, of K
    int const token_begin = Input::kOneRow ? 0 : blockIdx.y * kTokens;
    int const tokens = Input::kOneRow ? 1 : min(kTokens, p.m - token_begin);

    constexpr bool kRing = Input::kMade && kBulkCopies;
    uint32_t w[UNITS][Weights::kRegisters];
    char const* item;  // where this lane's next weights start
    int item_atoms;    // how many of them exist: none past the end, fewer in the last chunk
    int item_row8;     // from a lane's first row to its second (int8 rows only)
    auto aim = [&](int strip, int first_unit) {
        int const s = strip_begin + strip;
        item = Weights::lane_pointer(p.weight, s, p.k, p.n, lane) + first_unit * Weights::kUnitBytes;
        item_atoms = first_unit < g.units ? atoms - 2 * first_unit : 0;
        item_row8 = s * 16 + lane / 4 + 8 < p.n ? 8 * p.k : 0;
    };
    // Ahead of the wait, as weights are constant, and of everything else: DRAM is idle until then.
    aim(0, unit);
    if (Input::kMade && __builtin_expect(item_atoms >= 2 * UNITS, 1)) {
        if constexpr (Input::kMade) Weights::template load_whole<UNITS>(w, item);
    } else {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) Weights::load(w[u], item, u, item_atoms, item_row8);
    }
    uint32_t const first_tile = uint32_t(__cvta_generic_to_shared(shared));
    std::conditional_t<kRing, WeightRing<Weights, UNITS, WARPS>, NoRing> ring(first_tile + g.ring, g.ring_slots, p,
                                                                              strip_begin, strip_count, atoms);

    int const width = strip_count * 16;
    constexpr int kUnroll = Input::kMade ? 1 : 4;
#pragma unroll kUnroll
    for (int i = threadIdx.x; i < g.strips_max * Layout::kStripSums; i += kThreads) acc[i] = 0;
    using Output = OneOutput<typename Input::Output>;
    [[maybe_unused]] Output output(p, Input::kOneRow && threadIdx.x < width ? strip_begin * 16 + threadIdx.x : p.n);
    if constexpr (!Input::kOneRow)  // early, so that the epilogue need not wait for them
        for (int i = threadIdx.x; i < width && strip_begin * 16 + i < p.n; i += kThreads) {
            copy_4_bytes(channel_scale + i, p.weight_scale + strip_begin * 16 + i);
            if (p.bias != nullptr) copy_4_bytes(channel_bias + i, p.bias + strip_begin * 16 + i);
        }
    char* const input_shared = shared + Layout::total(code_bytes, g.strips_max);
    typename Input::Early early;
    if constexpr (Input::kMade) early = Input::template begin<WARPS>(input, tokens, input_shared);
    __syncthreads();  // sums are zero

    wait_for_previous_kernel();
    let_next_kernel_start();
    uint32_t const tile = first_tile + warp * Layout::kTileBytes;
    if constexpr (Input::kMade)
        Input::template make<Layout, WARPS>(input, early, tokens, shared, token_scale, input_shared,
                                            [&] {
                                                ring.fill();
                                                if constexpr (Input::kOneRow && Input::kAdds) output.load_residual(p);
                                            });
    else if (threadIdx.x < tokens)
        copy_4_bytes(token_scale + threadIdx.x, p.row_scale + token_begin + threadIdx.x);

    char const* const codes = static_cast<char const*>(p.codes) + size_t(token_begin) * p.k;
    auto fetch = [&](int first_unit) {  // the chunk's activations, 16 bytes a lane
        constexpr int kVectors = UNITS * kUnit / 16, kRows = 32 / kVectors;
        int const vector = lane % kVectors, column = first_unit * kUnit + vector * 16;
#pragma unroll
        for (int row = lane / kVectors; row < kTokens; row += kRows)
            if (row < tokens && column < p.k)
                copy_16_bytes_l1(tile + row * Layout::kRowBytes + vector * 16, codes + size_t(row) * p.k + column);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    if (!Input::kMade && unit < g.units) fetch(unit);
    while (unit < g.units) {
        uint32_t b[TOKEN_TILES][UNITS][4];
        if constexpr (!Input::kMade) asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncwarp();
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; ++t) {  // tokens past the end read row 0; their sums are never stored
            int const row = t * 8 + Weights::activation_row(lane);
            uint32_t const chunk =
                Input::kMade ? first_tile + unit / UNITS * Input::template chunk_stride<Layout>() : tile;
            uint32_t const address = Weights::activation_address(chunk, row < tokens ? row : 0,
                                                                 Input::template row_stride<Layout, WARPS>(), lane);
#pragma unroll
            for (int u = 0; u < UNITS; ++u) Weights::activations(b[t][u], address + Input::unit_offset(u));
        }
        __syncwarp();
        int const next_unit = unit + WARPS * UNITS;
        if (!Input::kMade && next_unit < g.units) fetch(next_unit);  // the copies land while this chunk is multiplied

#pragma unroll 1
        for (int strip = 0; strip < strip_count; ++strip) {
            if constexpr (kRing) {
                if (strip > 0 || unit >= WARPS * UNITS) ring.take(w, atoms - 2 * unit);  // else the first item
            } else if (strip + 1 < strip_count) {
                aim(strip + 1, unit);
            } else {
                aim(0, next_unit);
            }
            constexpr int kChains = Input::kOneRow ? 2 : 1;  // products that do not wait for one another
            int c[kChains][TOKEN_TILES][4] = {};
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                uint32_t a[2][4];
                Weights::fragment(a[0], w[u], 0);
                Weights::fragment(a[1], w[u], 1);
                if (!kRing) Weights::load(w[u], item, u, item_atoms, item_row8);
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; ++t) {
                    mma(c[0][t], a[0], b[t][u][0], b[t][u][1]);
                    mma(c[kChains - 1][t], a[1], b[t][u][2], b[t][u][3]);
                }
            }
            // Integers: the order of these adds cannot change the result.
            if constexpr (Input::kOneRow) {
                int* const sum = acc + strip * Layout::kStripSums + lane / 4;
                if (lane % 4 != 0) continue;  // other tokens
                atomicAdd(sum, c[0][0][0] + c[1][0][0]);
                atomicAdd(sum + 8, c[0][0][2] + c[1][0][2]);
            } else {
                int* const sum = acc + strip * Layout::kStripSums + (lane % 4) * 2 * kAccStride + lane / 4;
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; ++t) {
                    if (t * 8 >= tokens) break;
                    atomicAdd(sum + t * 8 * kAccStride, c[0][t][0]);
                    atomicAdd(sum + (t * 8 + 1) * kAccStride, c[0][t][1]);
                    atomicAdd(sum + t * 8 * kAccStride + 8, c[0][t][2]);
                    atomicAdd(sum + (t * 8 + 1) * kAccStride + 8, c[0][t][3]);
                }
            }
        }
        if constexpr (Input::kOneChunk && !kBulkCopies) break;  // said, so that Ampere and Ada keep nothing for another one
        unit = next_unit;
    }

    if constexpr (!Input::kOneRow) asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    auto sum_of = [&](int token, unsigned row) {
        return __fmul_rn(float(acc[row / 16 * Layout::kStripSums + token * kAccStride + row % 16]), Weights::kMultiplier);
    };
    if constexpr (Input::kOneRow) {
        output.store(p, sum_of(0, threadIdx.x), token_scale[0]);
#pragma unroll 1
        for (int row = threadIdx.x + kThreads; row < width; row += kThreads) {
            Output more(p, strip_begin * 16 + row);
            if constexpr (Input::kAdds) more.load_residual(p);
            more.store(p, sum_of(0, row), token_scale[0]);
        }
    } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900  // there are no registers for four times this with 64 of them
#pragma unroll 1
#endif
        for (int i = threadIdx.x; i < width * tokens; i += kThreads) {
            int const token = i / width, row = i - token * width, n = strip_begin * 16 + row;
            if (n >= p.n) continue;
            float value = __fmul_rn(__fmul_rn(sum_of(token, row), token_scale[token]), channel_scale[row]);
            if (p.bias != nullptr) value = __fadd_rn(value, channel_bias[row]);
            if constexpr (Input::kAdds)
                if (p.residual != nullptr) {
                    using T = typename Input::Output;
                    T const other = static_cast<T const*>(p.residual)[token * p.residual_stride + n];
                    value = __fadd_rn(to_float(static_cast<T>(value)), to_float(other));
                }
            store(p.out, size_t(token_begin + token) * p.ldd + n, value, p.type);
        }
    }
}

}  // namespace quarot::skinny
