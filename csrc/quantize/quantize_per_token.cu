// One CTA per row. The row stays in registers between the absmax and the codes (read once); rows too long for that are
// read twice, the second time from L2.
#include "quantize/quantize_per_token.h"

#include <algorithm>

#include "device/launch.cuh"
#include "device/quantize_row.cuh"
#include "device/reduce.cuh"
#include "device/vec8.cuh"

namespace quarot {
namespace {

constexpr int kMaxThreads = 512;

struct Args {
    const void* x;
    std::int64_t row_stride;
    int k, vectors;  // vectors = kp / 8
    void* codes;
    float* scale;
    float clip_over_qmax;
    int bits;
    CodeLayout layout;
};

// VECTORS > 0: that many groups of eight per thread, in registers; aligned rows, k a multiple of 8.
// VECTORS == 0: any row, read twice.
template <typename T, int VECTORS>
__global__ void __launch_bounds__(kMaxThreads) quantize_per_token_kernel(const Args a) {
    __shared__ unsigned scratch[32];
    pdl_trigger();
    pdl_wait();
    const std::int64_t row = blockIdx.x;
    const T* x = static_cast<const T*>(a.x) + row * a.row_stride;
    char* codes = static_cast<char*>(a.codes) + row * a.vectors * (a.layout == CodeLayout::kNibbles ? 4 : 8);

    unsigned top = 0;
    float v[8];
    const auto raise_top = [&] {
#pragma unroll
        for (int j = 0; j < 8; ++j) top = max(top, abs_bits(v[j]));
    };
    if constexpr (VECTORS > 0) {
        Vec8<T> kept[VECTORS];
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) kept[i] = load8(x, 8 * (threadIdx.x + i * blockDim.x), a.k);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            kept[i].unpack(v);
            raise_top();
        }
        const auto q = row_quantizer(__uint_as_float(block_max(top, scratch)), a.clip_over_qmax, a.bits, a.layout);
        if (threadIdx.x == 0) a.scale[row] = q.scale;
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int index = threadIdx.x + i * blockDim.x;
            kept[i].unpack(v);
            if (index < a.vectors) store_codes8(codes, index, a.layout, codes8(v, q));
        }
    } else {
        for (int index = threadIdx.x; index < a.vectors; index += blockDim.x) {
            load8_any(x, 8 * index, a.k, v);
            raise_top();
        }
        const auto q = row_quantizer(__uint_as_float(block_max(top, scratch)), a.clip_over_qmax, a.bits, a.layout);
        if (threadIdx.x == 0) a.scale[row] = q.scale;
        for (int index = threadIdx.x; index < a.vectors; index += blockDim.x) {
            load8_any(x, 8 * index, a.k, v);
            store_codes8(codes, index, a.layout, codes8(v, q));
        }
    }
}

template <typename T>
cudaError_t dispatch(const Args& a, std::int64_t rows, bool aligned, cudaStream_t stream) {
    // Two 16-byte loads in flight per thread where the row is long enough, four or eight beyond 8192 columns.
    const int per_thread = !aligned ? 0 : a.vectors <= 64 ? 1 : a.vectors <= 2 * kMaxThreads ? 2
                           : a.vectors <= 4 * kMaxThreads ? 4 : a.vectors <= 8 * kMaxThreads ? 8 : 0;
    const int wanted = per_thread ? (a.vectors + per_thread - 1) / per_thread : std::min(a.vectors, kMaxThreads);
    const dim3 grid(static_cast<unsigned>(rows)), block((wanted + 31) / 32 * 32);
    switch (per_thread) {
        case 1: return launch(quantize_per_token_kernel<T, 1>, grid, block, 0, stream, a);
        case 2: return launch(quantize_per_token_kernel<T, 2>, grid, block, 0, stream, a);
        case 4: return launch(quantize_per_token_kernel<T, 4>, grid, block, 0, stream, a);
        case 8: return launch(quantize_per_token_kernel<T, 8>, grid, block, 0, stream, a);
        default: return launch(quantize_per_token_kernel<T, 0>, grid, block, 0, stream, a);
    }
}

}  // namespace

cudaError_t quantize_per_token(const void* x, DType dtype, std::int64_t row_stride, std::int64_t rows, std::int64_t k,
                               void* codes, float* scale, float clip_over_qmax, int bits, CodeLayout layout,
                               cudaStream_t stream) {
    if (k < 1 || k > (1 << 30) || rows < 1 || rows > 0x7fffffff || !layout_fits(layout, bits))
        return cudaErrorInvalidValue;
    const std::int64_t width = dtype == DType::kFloat32 ? 4 : 2;
    const bool aligned = k % 8 == 0 && reinterpret_cast<std::uintptr_t>(x) % 16 == 0 &&
                         (rows == 1 || row_stride * width % 16 == 0);
    const Args a{x, row_stride, static_cast<int>(k), static_cast<int>((k + 31) / 32 * 4), codes, scale,
                 clip_over_qmax, bits, layout};
    switch (dtype) {
        case DType::kFloat16: return dispatch<__half>(a, rows, aligned, stream);
        case DType::kBFloat16: return dispatch<__nv_bfloat16>(a, rows, aligned, stream);
        default: return dispatch<float>(a, rows, aligned, stream);
    }
}

}  // namespace quarot
