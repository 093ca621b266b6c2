// One warp a token: its logits stay in registers, and each of the k rounds takes the largest that is left.
#include "experts/expert_route.h"

#include "device/launch.cuh"
#include "device/reduce.cuh"
#include "device/vec8.cuh"

namespace quarot {
namespace {

// Ordered like x, with -0 = +0 and NaN on top; never 0.
__device__ __forceinline__ unsigned ordered(float x) {
    unsigned const bits = __float_as_uint(__fadd_rn(x, 0.0f));
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

template <typename T, typename W, int PER_LANE>
__global__ void __launch_bounds__(32) expert_route_kernel(T const* logits, int experts, int top_k, bool normalize,
                                                          W* weight, std::int64_t* expert) {
    pdl_wait();
    int const lane = threadIdx.x;
    T const* const row = logits + std::int64_t(blockIdx.x) * experts;
    float x[PER_LANE];
    unsigned key[PER_LANE];  // 0: taken, or not there
    float top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        int const at = 32 * i + lane;
        x[i] = at < experts ? to_float(row[at]) : -INFINITY;
        key[i] = at < experts ? ordered(x[i]) : 0u;
        top = fmaxf(top, x[i]);
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask >>= 1) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, mask));
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
        if (32 * i + lane < experts) sum += expf(x[i] - top);
    sum = warp_sum(sum);

    float mine = 0.0f, chosen = 0.0f;  // lane j keeps the j-th weight
    int index = 0;
    for (int j = 0; j < top_k; ++j) {
        unsigned best = 0;
        int at = experts;
        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (key[i] > best) best = key[i], at = 32 * i + lane, value = x[i];
        unsigned const largest = __reduce_max_sync(kFullWarp, best);
        unsigned const first = __reduce_min_sync(kFullWarp, best == largest ? unsigned(at) : 0xffffffffu);
        float const p = expf(__shfl_sync(kFullWarp, value, first % 32) - top) / sum;
        chosen += p;
        if (lane == j) mine = p, index = int(first);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (32 * i + lane == int(first)) key[i] = 0u;
    }
    if (lane < top_k) {
        std::int64_t const out = std::int64_t(blockIdx.x) * top_k + lane;
        weight[out] = static_cast<W>(normalize ? mine / chosen : mine);
        expert[out] = index;
    }
    pdl_trigger();  // last: expert_gemm_w4a4, a kernel further on, looks for the experts before its predecessor has ended
}

struct Call {
    void const* logits;
    int rows, experts, top_k;
    bool normalize;
    void* weight;
    std::int64_t* expert;
    cudaStream_t stream;
};

template <typename T, typename W>
cudaError_t run(Call const& c) {
    auto const go = [&](auto kernel) {
        return launch(kernel, dim3(unsigned(c.rows)), dim3(32), 0, c.stream, static_cast<T const*>(c.logits), c.experts,
                      c.top_k, c.normalize, static_cast<W*>(c.weight), c.expert);
    };
    if (c.experts <= 32) return go(expert_route_kernel<T, W, 1>);
    if (c.experts <= 128) return go(expert_route_kernel<T, W, 4>);
    return go(expert_route_kernel<T, W, kMostExperts / 32>);
}

template <typename T>
cudaError_t run(Call const& c, DType weight_dtype) {
    switch (weight_dtype) {
        case DType::kFloat16: return run<T, __half>(c);
        case DType::kBFloat16: return run<T, __nv_bfloat16>(c);
        default: return run<T, float>(c);
    }
}

}  // namespace

cudaError_t expert_route(void const* logits, DType dtype, int rows, int experts, int top_k, bool normalize, void* weight,
                         DType weight_dtype, std::int64_t* expert, cudaStream_t stream) {
    if (rows < 1 || experts < 1 || experts > kMostExperts || top_k < 1 || top_k > experts || top_k > 32)
        return cudaErrorInvalidValue;
    Call const call{logits, rows, experts, top_k, normalize, weight, expert, stream};
    switch (dtype) {
        case DType::kFloat16: return run<__half>(call, weight_dtype);
        case DType::kBFloat16: return run<__nv_bfloat16>(call, weight_dtype);
        default: return run<float>(call, weight_dtype);
    }
}

}  // namespace quarot
