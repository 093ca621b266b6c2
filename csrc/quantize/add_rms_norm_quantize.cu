// One CTA per row; the sum stays in registers, and one barrier carries both reductions (sum of squares and absmax),
// because the normalised absmax is the absmax times the norm (rounding is monotonic). Rows longer than the registers
// hold are read twice.
#include "quantize/add_rms_norm_quantize.h"

#include "device/launch.cuh"
#include "device/quantize_row.cuh"
#include "device/reduce.cuh"
#include "device/vec8.cuh"

namespace quarot {
namespace {

constexpr int kMaxThreads = 512;

struct Args {
    const void *x, *residual;
    std::int64_t x_stride, residual_stride;
    int k, vectors;  // vectors = kp / 8
    float eps;
    void* codes;
    float* scale;
    void* sum;
    float clip_over_qmax;
    int bits;
    bool packed, aligned;
};

template <typename T>
__device__ __forceinline__ void load_sum(const Args& a, const T* x, const T* residual, int index, float (&v)[8]) {
    const int column = 8 * index, valid = a.k - column;
    load8(x + column, valid, a.aligned, v);
    if (residual) {
        float other[8];
        load8(residual + column, valid, a.aligned, other);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = to_float(static_cast<T>(__fadd_rn(v[j], other[j])));
    }
}

__device__ __forceinline__ void accumulate(const float (&v)[8], float& squares, unsigned& top) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        squares = fmaf(v[j], v[j], squares);
        top = max(top, abs_bits(v[j]));
    }
}

// VECTORS > 0: that many groups of eight per thread, in registers. VECTORS == 0: any row length, two passes.
template <typename T, int VECTORS>
__global__ void __launch_bounds__(kMaxThreads) add_rms_norm_quantize_kernel(const Args a) {
    __shared__ float2 scratch[kMaxThreads / 32];
    pdl_trigger();
    pdl_wait();
    const std::int64_t row = blockIdx.x;
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* residual = a.residual ? static_cast<const T*>(a.residual) + row * a.residual_stride : nullptr;
    T* sum = a.sum ? static_cast<T*>(a.sum) + row * a.k : nullptr;
    char* codes = static_cast<char*>(a.codes) + row * a.vectors * (a.packed ? 4 : 8);

    float v[VECTORS > 0 ? VECTORS : 1][8];
    float squares = 0.0f;
    unsigned top = 0;
    if constexpr (VECTORS > 0) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) load_sum(a, x, residual, threadIdx.x + i * blockDim.x, v[i]);
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) accumulate(v[i], squares, top);
    } else {
        for (int index = threadIdx.x; index < a.vectors; index += blockDim.x) {
            load_sum(a, x, residual, index, v[0]);
            accumulate(v[0], squares, top);
        }
    }

    squares = warp_sum(squares);
    top = __reduce_max_sync(kFullWarp, top);
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    if (lane == 0) scratch[threadIdx.x >> 5] = make_float2(squares, __uint_as_float(top));
    __syncthreads();
    const float2 mine = lane < warps ? scratch[lane] : make_float2(0.0f, 0.0f);
    squares = warp_sum(mine.x);
    top = __reduce_max_sync(kFullWarp, __float_as_uint(mine.y));

    const float mean = __fdiv_rn(squares, static_cast<float>(a.k));
    const float norm = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, a.eps)));
    const auto q = row_quantizer(__fmul_rn(__uint_as_float(top), norm), a.clip_over_qmax, a.bits);
    if (threadIdx.x == 0) a.scale[row] = q.scale;

    const auto finish = [&](int index, float (&value)[8]) {
        if (index >= a.vectors) return;
        if (sum) store8(sum + 8 * index, a.k - 8 * index, a.aligned, value);
#pragma unroll
        for (int j = 0; j < 8; ++j) value[j] = __fmul_rn(value[j], norm);
        store_codes8(codes, index, a.packed, codes8(value, q));
    };
    if constexpr (VECTORS > 0) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) finish(threadIdx.x + i * blockDim.x, v[i]);
    } else {
        for (int index = threadIdx.x; index < a.vectors; index += blockDim.x) {
            load_sum(a, x, residual, index, v[0]);
            finish(index, v[0]);
        }
    }
}

template <typename T>
cudaError_t dispatch(const Args& a, std::int64_t rows, cudaStream_t stream) {
    // Two vectors per thread and tensor measured best; 1024 threads lose 7-15 % at 8192 columns.
    const int per_thread = a.vectors <= 64 ? 1 : a.vectors <= 2 * kMaxThreads ? 2 : a.vectors <= 4 * kMaxThreads ? 4 : 0;
    const int wanted = per_thread ? (a.vectors + per_thread - 1) / per_thread : kMaxThreads;
    const dim3 grid(static_cast<unsigned>(rows)), block((wanted + 31) / 32 * 32);
    switch (per_thread) {
        case 1: return launch(add_rms_norm_quantize_kernel<T, 1>, grid, block, 0, stream, a);
        case 2: return launch(add_rms_norm_quantize_kernel<T, 2>, grid, block, 0, stream, a);
        case 4: return launch(add_rms_norm_quantize_kernel<T, 4>, grid, block, 0, stream, a);
        default: return launch(add_rms_norm_quantize_kernel<T, 0>, grid, block, 0, stream, a);
    }
}

bool aligned16(const void* p, std::int64_t stride_bytes, std::int64_t rows) {
    return reinterpret_cast<std::uintptr_t>(p) % 16 == 0 && (rows == 1 || stride_bytes % 16 == 0);
}

}  // namespace

cudaError_t add_rms_norm_quantize(const void* x, std::int64_t x_stride, const void* residual,
                                  std::int64_t residual_stride, DType dtype, std::int64_t rows, std::int64_t k,
                                  float eps, void* codes, float* scale, void* sum, float clip_over_qmax, int bits,
                                  bool packed, cudaStream_t stream) {
    if (k < 1 || k > (1 << 30) || rows < 1 || rows > 0x7fffffff || bits < 2 || bits > 8 || (packed && bits > 4))
        return cudaErrorInvalidValue;
    const std::int64_t width = dtype == DType::kFloat32 ? 4 : 2;
    const bool aligned = aligned16(x, x_stride * width, rows) && aligned16(sum, k * width, rows) &&
                         aligned16(residual, residual_stride * width, rows);
    const Args a{x, residual, x_stride, residual_stride, static_cast<int>(k), static_cast<int>((k + 31) / 32 * 4),
                 eps, codes, scale, sum, clip_over_qmax, bits, packed, aligned};
    switch (dtype) {
        case DType::kFloat16: return dispatch<__half>(a, rows, stream);
        case DType::kBFloat16: return dispatch<__nv_bfloat16>(a, rows, stream);
        default: return dispatch<float>(a, rows, stream);
    }
}

}  // namespace quarot
