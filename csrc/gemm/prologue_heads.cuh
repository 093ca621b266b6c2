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

/// TILES: 16 heads each, 2 or 4. T: __half or __nv_bfloat16. ONE_ROW: for a single row.
template <typename T, int TILES, bool ONE_ROW>
struct RotatedHeads : MadeChunks {
    static constexpr bool kOneRow = ONE_ROW, kAdds = true;
    using Output = T;
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
        T const* from;     // this thread's 16 bytes of a row ..
        int to;            // .. and their place in X; negative: it has none
        int tile, column;  // this warp's first tile, and its first column of a head
    };

    /// Head rows beyond the last, of X in shared memory [m][16 TILES][pitch], are zero.
    template <int WARPS>
    static __device__ Early begin(Arguments const& a, int rows, char* x) {
        Early early;
        int const warp = threadIdx.x / 32;
        int const pitch = heads::pitch(a.head_dim), words = (TILES * 16 - a.heads) * pitch / 16, chunks = a.head_dim / 8;
        early.tile = warp / chunks * 2, early.column = warp % chunks * 8;
#pragma unroll
        for (int mt = 0; mt < 2; ++mt)
            early.word[mt] = early.tile < TILES ? a.signs[(early.tile + mt) * 32 + threadIdx.x % 32] : 0;
        int const head = threadIdx.x / chunks;  // fits() leaves no row with more chunks than threads
        early.to = head < a.heads ? head * pitch + (int(threadIdx.x) - head * chunks) * 16 : -1;
        early.from = a.x + 8 * threadIdx.x;
        made_by_now(early.from);
#pragma unroll 1
        for (int row = 0; row < rows; ++row)
#pragma unroll 1
            for (int i = threadIdx.x; i < words; i += WARPS * 32)
                reinterpret_cast<uint4*>(x + (row * TILES * 16 + a.heads) * pitch)[i] = make_uint4(0, 0, 0, 0);
        return early;
    }

    template <class Layout, int WARPS, class Meanwhile>
    static __device__ void make(Arguments const& a, Early const& early, int rows, char* tiles, float* token_scale, char* x,
                                Meanwhile const& meanwhile) {
        __shared__ unsigned scratch[2][32];
        int const lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
        int const pitch = heads::pitch(a.head_dim);
        uint32_t const x_shared = uint32_t(__cvta_generic_to_shared(x));
        if (early.to >= 0)
#pragma unroll 1
            for (int row = 0; row < rows; ++row)
                copy_16_bytes(x_shared + row * TILES * 16 * pitch + early.to, early.from + row * a.row_stride);
        // While the row is on its way: signs, and where this lane's codes will lie.
        meanwhile();
        bool const works = early.tile < TILES;
        constexpr uint32_t kNowhere = ~0u;
        uint32_t h[TILES][2][4], target[2][2];
#pragma unroll
        for (int mt = 0; mt < 2; ++mt) {
#pragma unroll
            for (int q = 0; q < TILES; ++q) {
                heads::sign_fragment<T>(h[q][mt], early.word[mt], q);
#pragma unroll
                for (uint32_t& word : h[q][mt]) made_by_now(word);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                unsigned const head = 16 * (early.tile + mt) + g + 8 * half, k = head * a.head_dim + early.column + 2 * c;
                target[mt][half] = k / Layout::kChunk * RotatedHeads::template chunk_stride<Layout>() + k % Layout::kChunk;
                if (head >= a.heads) target[mt][half] = kNowhere;
                made_by_now(target[mt][half]);
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncthreads();

#pragma unroll 1
        for (int row = 0; row < rows; ++row) {
            float acc[2][4] = {};
            unsigned top = 0;
            if (works) {
                uint32_t const address = x_shared + (row * TILES * 16 + lane) * pitch + early.column * 2;
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
                        if (target[mt][i / 2] != kNowhere) top = max(top, abs_bits(acc[mt][i]));
                    }
            }
            RowQuantizer const q =
                row_quantizer(__uint_as_float(block_max(top, scratch[row % 2])), a.clip_over_qmax, a.bits);
            if (threadIdx.x == 0) token_scale[row] = q.scale;
            char* const codes = tiles + row * RotatedHeads::template row_stride<Layout, WARPS>();
#pragma unroll
            for (int mt = 0; mt < 2; ++mt)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    unsigned const pair = __byte_perm(code_bits(acc[mt][2 * half], q),
                                                      code_bits(acc[mt][2 * half + 1], q), 0x0040);
                    if (target[mt][half] != kNowhere)
                        *reinterpret_cast<uint16_t*>(codes + target[mt][half]) = uint16_t(pair);
                }
        }
        __syncthreads();
    }
};

}  // namespace quarot::skinny
