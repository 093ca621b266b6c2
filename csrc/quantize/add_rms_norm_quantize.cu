// One CTA per row; the sum stays in registers, and one barrier carries both reductions (sum of squares and absmax),
// because the normalised absmax is the absmax times the norm (rounding is monotonic). Rows longer than the registers
// hold are read twice. csrc/gemm/prologue_norm.cuh does the same inside a GEMM, to the same bits.
#include "quantize/add_rms_norm_quantize.h"

#include <algorithm>

#include "device/launch.cuh"
#include "device/vec8.cuh"
#include "quantize/rms_norm_row.cuh"

namespace quarot {
namespace {

constexpr int kMaxThreads = 512;

struct Args {
    const void *x, *residual;
    std::int64_t x_stride, residual_stride;
    int vectors;  // kp / 8
    NormRule rule;
    void* codes;
    float* scale;
    void* sum;
    void* values;  // not null: the normalised row itself instead of codes and scale
};

// Every thread of the block, with its warp's part of the row's reductions: one barrier. Pieces of 256 columns come in
// the order of columns where a thread's vectors are blockDim apart.
template <int PIECES>
__device__ __forceinline__ RowNorm reduce(const Args& a, const float2 (&lane_parts)[PIECES], float2* pieces) {
    const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const float2 piece = warp_squares(lane_parts[i]);
        if ((threadIdx.x & 31) == 0) pieces[i * warps + warp] = piece;
    }
    __syncthreads();
    const RowNorm n = row_norm(row_squares(pieces, PIECES * warps), a.rule);
    if (threadIdx.x == 0 && !a.values) a.scale[blockIdx.x] = n.q.scale;
    return n;
}

template <typename T, bool kAligned>
__device__ __forceinline__ void store_result(const Args& a, int index, float (&v)[8], const RowNorm& n) {
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(v[j], n.norm);
    if (a.values) {
        T* row = static_cast<T*>(a.values) + static_cast<std::int64_t>(blockIdx.x) * a.rule.k;
        if constexpr (kAligned) {
            Vec8<T> packed;
            packed.pack(v);
            if (8 * index < a.rule.k) store8(row, 8 * index, packed);
        } else {
            store8_any(row, 8 * index, a.rule.k, v);
        }
        return;
    }
    const int bytes = a.rule.layout == CodeLayout::kNibbles ? 4 : 8;
    char* codes = static_cast<char*>(a.codes) + static_cast<std::int64_t>(blockIdx.x) * a.vectors * bytes;
    store_codes8(codes, index, a.rule.layout, codes8(v, n.q));
}

// Aligned rows, k a multiple of 8: VECTORS groups of eight per thread stay in registers, and the sum is stored before
// the barrier.
template <typename T, int VECTORS, bool kResidual>
__global__ void __launch_bounds__(kMaxThreads) add_rms_norm_quantize_kernel(const Args a) {
    __shared__ float2 pieces[VECTORS * kMaxThreads / 32];
    pdl_trigger();
    pdl_wait();
    const std::int64_t row = blockIdx.x;
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* sum = static_cast<T*>(a.sum) + row * a.rule.k;

    Vec8<T> kept[VECTORS], other[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = 8 * (threadIdx.x + i * blockDim.x);
        kept[i] = load8(x, column, a.rule.k);
        if constexpr (kResidual)
            other[i] = load8(static_cast<const T*>(a.residual) + row * a.residual_stride, column, a.rule.k);
    }
    float v[8];
    float2 lane_parts[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int column = 8 * (threadIdx.x + i * blockDim.x);
        if constexpr (kResidual) {
            float w[8];
            kept[i].unpack(v);
            other[i].unpack(w);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = __fadd_rn(v[j], w[j]);
            kept[i].pack(v);
        }
        if (a.sum && column < a.rule.k) store8(sum, column, kept[i]);
        kept[i].unpack(v);
        lane_parts[i] = lane_squares(v);
    }
    const RowNorm n = reduce(a, lane_parts, pieces);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
        const int index = threadIdx.x + i * blockDim.x;
        kept[i].unpack(v);
        if (index < a.vectors) store_result<T, true>(a, index, v, n);
    }
}

// Any row, read twice.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads) add_rms_norm_quantize_any_kernel(const Args a) {
    __shared__ float2 pieces[kMaxThreads / 32];
    pdl_trigger();
    pdl_wait();
    const std::int64_t row = blockIdx.x;
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* residual = a.residual ? static_cast<const T*>(a.residual) + row * a.residual_stride : nullptr;
    float v[8];
    float2 lane_parts[1] = {};
    const auto load_sum = [&](int index) {
        load8_any(x, 8 * index, a.rule.k, v);
        if (!residual) return;
        float w[8];
        load8_any(residual, 8 * index, a.rule.k, w);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = to_float(static_cast<T>(__fadd_rn(v[j], w[j])));
    };
    for (int index = threadIdx.x; index < a.vectors; index += blockDim.x) {
        load_sum(index);
        const float2 more = lane_squares(v);
        const unsigned top = max(__float_as_uint(lane_parts[0].y), __float_as_uint(more.y));
        lane_parts[0] = make_float2(lane_parts[0].x + more.x, __uint_as_float(top));
    }
    const RowNorm n = reduce(a, lane_parts, pieces);
    for (int index = threadIdx.x; index < a.vectors; index += blockDim.x) {
        load_sum(index);
        if (a.sum) store8_any(static_cast<T*>(a.sum) + row * a.rule.k, 8 * index, a.rule.k, v);
        store_result<T, false>(a, index, v, n);
    }
}

template <typename T, int VECTORS>
cudaError_t launch_vectors(const Args& a, dim3 grid, cudaStream_t stream) {
    const dim3 block(((a.vectors + VECTORS - 1) / VECTORS + 31) / 32 * 32);
    return a.residual ? launch(add_rms_norm_quantize_kernel<T, VECTORS, true>, grid, block, 0, stream, a)
                      : launch(add_rms_norm_quantize_kernel<T, VECTORS, false>, grid, block, 0, stream, a);
}

template <typename T>
cudaError_t dispatch(const Args& a, std::int64_t rows, bool aligned, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(rows));
    if (aligned && a.vectors <= 64) return launch_vectors<T, 1>(a, grid, stream);
    if (aligned && a.vectors <= 2 * kMaxThreads) return launch_vectors<T, 2>(a, grid, stream);
    if (aligned && a.vectors <= 4 * kMaxThreads) return launch_vectors<T, 4>(a, grid, stream);
    const dim3 block(std::min((a.vectors + 31) / 32 * 32, kMaxThreads));
    return launch(add_rms_norm_quantize_any_kernel<T>, grid, block, 0, stream, a);
}

bool aligned16(const void* p, std::int64_t stride_bytes, std::int64_t rows) {
    return reinterpret_cast<std::uintptr_t>(p) % 16 == 0 && (rows == 1 || stride_bytes % 16 == 0);
}

cudaError_t run(const Args& a, DType dtype, std::int64_t rows, cudaStream_t stream) {
    const std::int64_t width = dtype == DType::kFloat32 ? 4 : 2;
    const std::int64_t k = a.rule.k;
    const bool aligned = k % 8 == 0 && aligned16(a.x, a.x_stride * width, rows) && aligned16(a.sum, k * width, rows) &&
                         aligned16(a.residual, a.residual_stride * width, rows) && aligned16(a.values, k * width, rows);
    switch (dtype) {
        case DType::kFloat16: return dispatch<__half>(a, rows, aligned, stream);
        case DType::kBFloat16: return dispatch<__nv_bfloat16>(a, rows, aligned, stream);
        default: return dispatch<float>(a, rows, aligned, stream);
    }
}

bool size_fits(std::int64_t rows, std::int64_t k) { return k >= 1 && k <= (1 << 30) && rows >= 1 && rows <= 0x7fffffff; }

}  // namespace

cudaError_t add_rms_norm_quantize(const void* x, std::int64_t x_stride, const void* residual,
                                  std::int64_t residual_stride, DType dtype, std::int64_t rows, std::int64_t k,
                                  float eps, void* codes, float* scale, void* sum, float clip_over_qmax, int bits,
                                  CodeLayout layout, cudaStream_t stream) {
    if (!size_fits(rows, k) || !layout_fits(layout, bits)) return cudaErrorInvalidValue;
    const NormRule rule{static_cast<int>(k), eps, clip_over_qmax, bits, layout};
    return run({x, residual, x_stride, residual_stride, static_cast<int>((k + 31) / 32 * 4), rule, codes, scale, sum,
                nullptr},
               dtype, rows, stream);
}

cudaError_t add_rms_norm(const void* x, std::int64_t x_stride, const void* residual, std::int64_t residual_stride,
                         DType dtype, std::int64_t rows, std::int64_t k, float eps, void* out, cudaStream_t stream) {
    if (!size_fits(rows, k)) return cudaErrorInvalidValue;
    const NormRule rule{static_cast<int>(k), eps, 1.0f, 8};
    return run({x, residual, x_stride, residual_stride, static_cast<int>((k + 7) / 8), rule, nullptr, nullptr, nullptr,
                out},
               dtype, rows, stream);
}

}  // namespace quarot
