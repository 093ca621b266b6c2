// Hadamard across heads and quantiser as the beginning of a few-token GEMM (csrc/hadamard/heads.h is the same as a kernel
// of its own; codes and scales are equal bit for bit).
//
// Every block does it for itself. A warp has 8 columns of the outputs of 32 heads (two mma tiles), which must be enough
// for a row; codes go to the tiles of the warps that multiply them.
#pragma once

#include "device/quantize_row.cuh"
#include "device/reduce.cuh"
#include "gemm/skinny_kernel.cuh"
#include "hadamard/heads_mma.cuh"

namespace quarot::skinny {

/// TILES: 16 heads each, 2 or 4. T: __half or __nv_bfloat16.
template <typename T, int TILES>
struct RotatedHeads : MadeChunks {
    static constexpr bool kAdds = true;
    struct Arguments {
        T const* x;  ///< [m, heads * head_dim], 16-byte aligned rows
        int64_t row_stride;
        int heads, head_dim;
        uint32_t const* signs;  ///< as in heads.h: constant, so it may be read before the kernels ahead have ended
        float norm;
        float clip_over_qmax;
        int bits;
    };

    static bool fits(int head_dim, int warps) { return head_dim / 8 * (TILES / 2) <= warps; }

    /// Of X in shared memory.
    static int row_bytes(int head_dim) { return TILES * 16 * heads::pitch(head_dim); }

    struct Early {
        uint32_t word[2];  // signs of this warp's two 16-head tiles
        int place;         // of this thread's 16 bytes of a row in X; negative: it has none
    };

    /// Head rows beyond the last, of X in shared memory [m][16 TILES][pitch], are zero.
    template <int WARPS>
    static __device__ Early begin(Arguments const& a, int rows, char* x) {
        Early early;
        int const tile = first_tile(a.head_dim);
#pragma unroll
        for (int mt = 0; mt < 2; ++mt)
            early.word[mt] = tile < TILES ? a.signs[(tile + mt) * 32 + threadIdx.x % 32] : 0;
        int const pitch = heads::pitch(a.head_dim), words = (TILES * 16 - a.heads) * pitch / 16, chunks = a.head_dim / 8;
        int const head = threadIdx.x / chunks;  // fits() leaves no row with more chunks than threads
        early.place = head < a.heads ? head * pitch + (int(threadIdx.x) - head * chunks) * 16 : -1;
#pragma unroll 1
        for (int row = 0; row < rows; ++row)
#pragma unroll 1
            for (int i = threadIdx.x; i < words; i += WARPS * 32)
                reinterpret_cast<uint4*>(x + (row * TILES * 16 + a.heads) * pitch)[i] = make_uint4(0, 0, 0, 0);
        return early;
    }

    /// Of the two that a warp has.
    static __device__ int first_tile(int head_dim) { return int(threadIdx.x) / 32 / (head_dim / 8) * 2; }

    template <class Layout, int WARPS>
    static __device__ void make(Arguments const& a, Early const& early, int rows, char* tiles, float* token_scale, char* x) {
        __shared__ unsigned scratch[2][32];
        int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
        int const pitch = heads::pitch(a.head_dim), chunks = a.head_dim / 8;  // 16-byte chunks of a head
        uint32_t const x_shared = uint32_t(__cvta_generic_to_shared(x));
        if (early.place >= 0)
#pragma unroll 1
            for (int row = 0; row < rows; ++row)
                copy_16_bytes(x_shared + row * TILES * 16 * pitch + early.place, a.x + row * a.row_stride + 8 * threadIdx.x);
        int const column = warp % chunks * 8, tile = first_tile(a.head_dim);  // column: of a head
        bool const works = tile < TILES;
        uint32_t h[TILES][2][4];  // made while the row is on its way
#pragma unroll
        for (int q = 0; q < TILES; ++q)
#pragma unroll
            for (int mt = 0; mt < 2; ++mt) heads::sign_fragment<T>(h[q][mt], early.word[mt], q);
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();

#pragma unroll 1
        for (int row = 0; row < rows; ++row) {
            float acc[2][4] = {};
            unsigned top = 0;
            if (works) {
                uint32_t const address = x_shared + (row * TILES * 16 + lane) * pitch + column * 2;
#pragma unroll
                for (int q = 0; q < TILES; q += 2) {
                    uint32_t b[4];
                    heads::ldmatrix4_transposed(b, address + 16 * q * pitch);
#pragma unroll
                    for (int part = 0; part < 2; ++part)
#pragma unroll
                        for (int mt = 0; mt < 2; ++mt)
                            heads::mma<T>(acc[mt], h[q + part][mt], b[2 * part], b[2 * part + 1]);
                }
#pragma unroll
                for (int mt = 0; mt < 2; ++mt)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        acc[mt][i] *= a.norm;
                        if (16 * (tile + mt) + g + 8 * (i / 2) < a.heads) top = max(top, abs_bits(acc[mt][i]));
                    }
            }
            RowQuantizer const q =
                row_quantizer(__uint_as_float(block_max(top, scratch[row % 2])), a.clip_over_qmax, a.bits);
            if (threadIdx.x == 0) token_scale[row] = q.scale;
#pragma unroll
            for (int mt = 0; mt < 2; ++mt)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    int const head = 16 * (tile + mt) + g + 8 * half, k = head * a.head_dim + column + 2 * c;
                    unsigned const pair = __byte_perm(code_bits(acc[mt][2 * half], q),
                                                      code_bits(acc[mt][2 * half + 1], q), 0x0040);
                    char* const place = tiles + k / Layout::kChunk * RotatedHeads::template chunk_stride<Layout>() +
                                        row * RotatedHeads::template row_stride<Layout, WARPS>() + k % Layout::kChunk;
                    if (works && head < a.heads) *reinterpret_cast<uint16_t*>(place) = uint16_t(pair);
                }
        }
        __syncthreads();
    }
};

}  // namespace quarot::skinny
