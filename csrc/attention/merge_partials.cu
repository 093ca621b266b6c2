// Two partial attention results together: one read of each, one write, instead of a dozen elementwise kernels.
#include "attention/merge_partials.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/launch.cuh"

namespace quarot {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float4 load_four(const void* x, DType dtype, std::int64_t i) {
    if (dtype == DType::kFloat32) return *reinterpret_cast<const float4*>(static_cast<const float*>(x) + i);
    const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(x) + i);
    float2 low, high;
    if (dtype == DType::kFloat16) {
        low = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
        high = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
    } else {
        low = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&raw.x));
        high = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&raw.y));
    }
    return {low.x, low.y, high.x, high.y};
}

__device__ __forceinline__ void store_four(void* x, DType dtype, std::int64_t i, float4 y) {
    if (dtype == DType::kFloat32) {
        *reinterpret_cast<float4*>(static_cast<float*>(x) + i) = y;
    } else if (dtype == DType::kFloat16) {
        auto* target = reinterpret_cast<__half2*>(static_cast<__half*>(x) + i);
        target[0] = __floats2half2_rn(y.x, y.y), target[1] = __floats2half2_rn(y.z, y.w);
    } else {
        auto* target = reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(x) + i);
        target[0] = __floats2bfloat162_rn(y.x, y.y), target[1] = __floats2bfloat162_rn(y.z, y.w);
    }
}

// A thread merges 4 dims of a row; rows in the order of the output.
__global__ void __launch_bounds__(kThreads) merge_partials_kernel(const __grid_constant__ MergeParams p) {
    pdl_trigger();
    pdl_wait();
    const int quads = p.head_dim / 4;
    const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x, row = index / quads;
    const int quad = static_cast<int>(index - row * quads);
    if (row >= static_cast<std::int64_t>(p.batch) * p.tokens * p.heads) return;
    const std::int64_t head = row % p.heads, token = row / p.heads % p.tokens, batch = row / p.heads / p.tokens;
    const auto at = [&](const std::int64_t (&stride)[3]) { return batch * stride[0] + head * stride[1] + token * stride[2]; };
    const PartialResult &one = p.parts[0], &other = p.parts[1];
    const float a = one.lse[at(one.lse_stride)], b = other.lse[at(other.lse_stride)];
    const float4 x = load_four(one.out, one.dtype, at(one.out_stride) + 4 * quad);
    const float4 y = load_four(other.out, other.dtype, at(other.out_stride) + 4 * quad);
    const float lead = b - a;  // NaN where both are -inf: then half of each
    const float weight = isnan(lead) ? 0.5f : 1.0f / (1.0f + exp2f(-lead));
    const auto mix = [&](float u, float v) { return u + weight * (v - u); };
    store_four(p.out, p.dtype, row * p.head_dim + 4 * quad, {mix(x.x, y.x), mix(x.y, y.y), mix(x.z, y.z), mix(x.w, y.w)});
    if (quad == 0) {
        const float high = fmaxf(a, b), low = fminf(a, b);
        p.lse[row] = isinf(high) ? high : high + log2f(1.0f + exp2f(low - high));
    }
}

}  // namespace

cudaError_t merge_partials(const MergeParams& p, cudaStream_t stream) {
    const std::int64_t threads = static_cast<std::int64_t>(p.batch) * p.tokens * p.heads * (p.head_dim / 4);
    if (threads == 0) return cudaSuccess;
    return launch(merge_partials_kernel, dim3(static_cast<unsigned>((threads + kThreads - 1) / kThreads)), dim3(kThreads),
                  0, stream, p);
}

}  // namespace quarot
