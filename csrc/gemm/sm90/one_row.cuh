// One row of stored codes in front of a few-token GEMM.
#pragma once

#include "gemm/skinny_kernel.cuh"

namespace quarot::skinny {

/// All chunks that a warp multiplies, at most CHUNKS, copied by it at once. T: __half or __nv_bfloat16, of the output.
template <typename T, int CHUNKS>
struct StoredRow : StoredCodes {
    static constexpr bool kMade = true, kOneRow = true;
    using Output = T;
    struct Arguments {
        char const* codes;  ///< int8 [k], 16-byte aligned
        float const* row_scale;
        int k;
    };

    template <class Layout, int WARPS>
    static __host__ __device__ constexpr int row_stride() { return 0; }
    template <class Layout>
    static __host__ __device__ constexpr int chunk_stride() { return Layout::kChunk; }
    template <class Layout, int WARPS>
    static __host__ __device__ constexpr int code_bytes(int) { return WARPS * CHUNKS * Layout::kChunk; }

    template <int WARPS>
    static __device__ Early begin(Arguments const&, int, char*) { return {}; }

    template <class Layout, int WARPS, class Meanwhile>
    static __device__ void make(Arguments const& a, Early const&, int, char* codes, float* token_scale, char*,
                                Meanwhile const& meanwhile) {
        static_assert(Layout::kChunk == 16 * 16);  // 16 lanes a chunk
        int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        uint32_t const target = uint32_t(__cvta_generic_to_shared(codes));
#pragma unroll
        for (int first = 0; first < CHUNKS; first += 2) {
            int const chunk = first + lane / 16, column = (warp + chunk * WARPS) * Layout::kChunk + lane % 16 * 16;
            if (chunk < CHUNKS && column < a.k) copy_16_bytes(target + column, a.codes + column);
        }
        if (threadIdx.x == 0) copy_4_bytes(token_scale, a.row_scale);
        meanwhile();
        asm volatile("cp.async.wait_all;" ::: "memory");
    }
};

}  // namespace quarot::skinny
