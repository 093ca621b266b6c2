// Residual add, RMSNorm and quantiser as the beginning of a few-token GEMM (csrc/quantize/add_rms_norm_quantize.h is the
// same as a kernel of its own; codes, scales and sums are equal bit for bit).
//
// Every block does it for itself: a warp makes the codes of the 256 columns that it multiplies, so that nothing but the
// row's sum of squares and absmax has to cross the block.
#pragma once

#include "device/vec8.cuh"
#include "gemm/skinny_kernel.cuh"
#include "quantize/rms_norm_row.cuh"

namespace quarot::skinny {

/// ROWS: rows whose loads are in flight together; with 1 there is no other row. T: __half or __nv_bfloat16.
template <typename T, int ROWS>
struct NormRows : MadeChunks {
    static constexpr bool kOneRow = ROWS == 1;
    using Output = T;
    struct Arguments {
        T const* x;         ///< [m, k], 16-byte aligned rows
        T const* residual;  ///< alike, or null
        int64_t x_stride, residual_stride;
        T* sum;  ///< [m, k] contiguous; written by one block a row, read by none
        NormRule rule;
    };

    struct Early {
        T const* x;  // this lane's columns of the first row
    };

    template <int WARPS>
    static __device__ Early begin(Arguments const& a, int, char*) {
        Early early{a.x + threadIdx.x * (kWarpColumns / 32)};
        made_by_now(early.x);
        return early;
    }

    /// Codes of row r at `tiles` + warp * chunk_stride + r * row_stride, visible to the warp that reads them.
    template <class Layout, int WARPS, class Meanwhile>
    static __device__ void make(Arguments const& a, Early const& early, int rows, char* tiles, float* token_scale, char*,
                                Meanwhile const& meanwhile) {
        static_assert(Layout::kChunk == kWarpColumns);
        __shared__ float2 pieces[ROWS][WARPS];
        int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = warp * kWarpColumns + 8 * lane;
        char* const mine = tiles + warp * chunk_stride<Layout>() + 8 * lane;
        for (int first = 0; first < rows; first += ROWS) {
            Vec8<T> kept[ROWS], other[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                if (first + r >= rows) break;
                kept[r] = load8(early.x + (first + r) * a.x_stride, 0, a.rule.k - column);
                if (a.residual) other[r] = load8(a.residual + (first + r) * a.residual_stride, column, a.rule.k);
            }
            if (first > 0)
                __syncthreads();  // the pieces of the rows before have been read
            else
                meanwhile();
            float v[8];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                int const row = first + r;
                if (row >= rows) break;
                kept[r].unpack(v);
                if (a.residual) {
                    float w[8];
                    other[r].unpack(w);
#pragma unroll
                    for (int j = 0; j < 8; ++j) v[j] = __fadd_rn(v[j], w[j]);
                    kept[r].pack(v);
                    kept[r].unpack(v);
                }
                if (blockIdx.x == (row < gridDim.x ? row : 0) && column < a.rule.k)
                    store8(a.sum + int64_t(row) * a.rule.k, column, kept[r]);
                float2 const piece = warp_squares(lane_squares(v));
                if (lane == 0) pieces[r][warp] = piece;
            }
            __syncthreads();
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                int const row = first + r;
                if (row >= rows) break;
                RowNorm const n = row_norm(row_squares(pieces[r], WARPS), a.rule);
                if (threadIdx.x == 0) token_scale[row] = n.q.scale;
                kept[r].unpack(v);
#pragma unroll
                for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(v[j], n.norm);
                *reinterpret_cast<uint2*>(mine + row * row_stride<Layout, WARPS>()) = codes8(v, n.q);
            }
        }
    }
};

}  // namespace quarot::skinny
