// One CTA a row: 64 KB of fp16 logits from L2 take about as long as a second kernel to merge several CTAs would.
#include "decode_step/argmax_rows.h"

#include "device/launch.cuh"
#include "device/reduce.cuh"
#include "device/vec8.cuh"

namespace quarot {
namespace {

constexpr int kThreads = 1024;

// Ordered like x, with -0 = +0 and NaN on top.
__device__ __forceinline__ unsigned ordered(float x) {
    const unsigned bits = __float_as_uint(__fadd_rn(x, 0.0f));
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

struct Best {
    unsigned value = 0, index = 0xffffffffu;

    __device__ __forceinline__ void offer(unsigned v, unsigned i) {
        if (v > value || (v == value && i < index)) value = v, index = i;
    }

    // Over the warp, in every lane.
    __device__ __forceinline__ void reduce() {
        const unsigned top = __reduce_max_sync(kFullWarp, value);
        index = __reduce_min_sync(kFullWarp, value == top ? index : 0xffffffffu);
        value = top;
    }
};

template <typename T>
__global__ void __launch_bounds__(kThreads) argmax_rows_kernel(const T* logits, std::int64_t row_stride, int columns,
                                                               bool aligned, std::int64_t* out) {
    __shared__ unsigned values[32], indices[32];
    pdl_trigger();
    pdl_wait();
    const T* row = logits + blockIdx.x * row_stride;
    Best best;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900  // more than two spill in bf16
    constexpr int kInFlight = 2;
#else
    constexpr int kInFlight = 4;
#endif
    for (int start = 8 * threadIdx.x; start < columns; start += 8 * kThreads * kInFlight) {
        float v[kInFlight][8];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const int column = start + 8 * kThreads * i;
            if (aligned)
                load8(row, column, columns).unpack(v[i]);
            else
                load8_any(row, column, columns, v[i]);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int column = start + 8 * kThreads * i + j;
                if (column < columns) best.offer(ordered(v[i][j]), column);
            }
    }
    best.reduce();
    const unsigned lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    if (lane == 0) values[warp] = best.value, indices[warp] = best.index;
    __syncthreads();
    if (warp != 0) return;
    best.value = values[lane], best.index = indices[lane];
    best.reduce();
    if (lane == 0) out[blockIdx.x] = best.index;
}

template <typename T>
cudaError_t run(const void* logits, std::int64_t row_stride, int rows, int columns, std::int64_t* out,
                cudaStream_t stream) {
    const bool aligned = columns % 8 == 0 && reinterpret_cast<std::uintptr_t>(logits) % 16 == 0 &&
                         (rows == 1 || row_stride * sizeof(T) % 16 == 0);
    return launch(argmax_rows_kernel<T>, dim3(static_cast<unsigned>(rows)), dim3(kThreads), 0, stream,
                  static_cast<const T*>(logits), row_stride, columns, aligned, out);
}

}  // namespace

cudaError_t argmax_rows(const void* logits, DType dtype, std::int64_t row_stride, int rows, int columns,
                        std::int64_t* out, cudaStream_t stream) {
    if (rows < 1 || columns < 1 || columns > 0x7fff0000) return cudaErrorInvalidValue;
    switch (dtype) {
        case DType::kFloat16: return run<__half>(logits, row_stride, rows, columns, out, stream);
        case DType::kBFloat16: return run<__nv_bfloat16>(logits, row_stride, rows, columns, out, stream);
        default: return run<float>(logits, row_stride, rows, columns, out, stream);
    }
}

}  // namespace quarot
