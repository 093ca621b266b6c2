// What stands around the products of the few-token kernel: where its codes come from, how shared memory is laid out, and what
// becomes of a sum.
#pragma once

#include "device/vec8.cuh"
#include "gemm/skinny_weights.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace quarot::skinny {

constexpr int kAccStride = 20;  // int32 words from token to token: 16 rows, padded so that fragment adds hit 32 banks

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

/// Activation codes in global memory, read chunk by chunk. The other inputs (prologue_*.cuh, sm90/one_row.cuh) have them in
/// shared memory before the first product (`kMade`) and say how they lie there: row r of chunk i begins at i * chunk_stride +
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

}  // namespace quarot::skinny
