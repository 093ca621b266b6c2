// Eight columns of one token a thread.
#include "experts/expert_sum.h"

#include "device/launch.cuh"
#include "device/vec8.cuh"

namespace quarot {
namespace {

constexpr int kThreads = 128, kInFlight = 8;

template <typename T, typename W>
__global__ void __launch_bounds__(kThreads) expert_sum_kernel(T const* x, W const* weight, int top_k, int n, T* out) {
    pdl_trigger();
    pdl_wait();
    int const column = 8 * (blockIdx.x * kThreads + threadIdx.x);
    if (column >= n) return;
    T const* const rows = x + size_t(blockIdx.y) * top_k * n;
    W const* const weights = weight + size_t(blockIdx.y) * top_k;
    float sum[8] = {};
    for (int first = 0; first < top_k; first += kInFlight) {
        Vec8<T> read[kInFlight];
        float w[kInFlight];
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
            bool const there = first + j < top_k;
            read[j] = load8(rows + size_t(there ? first + j : 0) * n, column, there ? n : 0);
            w[j] = there ? to_float(weights[first + j]) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < kInFlight; ++j) {
            float v[8];
            read[j].unpack(v);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (first + j < top_k) sum[i] = __fadd_rn(sum[i], __fmul_rn(v[i], w[j]));
        }
    }
    Vec8<T> rounded;
    rounded.pack(sum);
    store8(out + size_t(blockIdx.y) * n, column, rounded);
}

template <typename T, typename W>
cudaError_t run(void const* x, void const* weight, int tokens, int top_k, int n, void* out, cudaStream_t stream) {
    return launch(expert_sum_kernel<T, W>, dim3(unsigned((n / 8 + kThreads - 1) / kThreads), unsigned(tokens)),
                  dim3(kThreads), 0, stream, static_cast<T const*>(x), static_cast<W const*>(weight), top_k, n,
                  static_cast<T*>(out));
}

template <typename T>
cudaError_t run(void const* x, void const* weight, DType weight_dtype, int tokens, int top_k, int n, void* out,
                cudaStream_t stream) {
    switch (weight_dtype) {
        case DType::kFloat16: return run<T, __half>(x, weight, tokens, top_k, n, out, stream);
        case DType::kBFloat16: return run<T, __nv_bfloat16>(x, weight, tokens, top_k, n, out, stream);
        default: return run<T, float>(x, weight, tokens, top_k, n, out, stream);
    }
}

}  // namespace

cudaError_t expert_sum(void const* x, DType dtype, void const* weight, DType weight_dtype, int tokens, int top_k, int n,
                       void* out, cudaStream_t stream) {
    if (tokens < 1 || tokens > 65535 || top_k < 1 || n < 8 || n % 8 != 0) return cudaErrorInvalidValue;
    switch (dtype) {
        case DType::kFloat16: return run<__half>(x, weight, weight_dtype, tokens, top_k, n, out, stream);
        case DType::kBFloat16: return run<__nv_bfloat16>(x, weight, weight_dtype, tokens, top_k, n, out, stream);
        default: return run<float>(x, weight, weight_dtype, tokens, top_k, n, out, stream);
    }
}

}  // namespace quarot
