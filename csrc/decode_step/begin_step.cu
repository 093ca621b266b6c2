// One CTA a row: it copies the row of the embedding, and its first threads compute the rest.
#include "decode_step/begin_step.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/launch.cuh"

namespace quarot {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ void store(void* row, int i, float x, DType dtype) {
    if (dtype == DType::kFloat32)
        static_cast<float*>(row)[i] = x;
    else if (dtype == DType::kFloat16)
        static_cast<__half*>(row)[i] = __float2half_rn(x);
    else
        static_cast<__nv_bfloat16*>(row)[i] = __float2bfloat16_rn(x);
}

__global__ void __launch_bounds__(kThreads) begin_step_kernel(const __grid_constant__ BeginStepParams p) {
    pdl_trigger();
    pdl_wait();
    const int row = blockIdx.x;
    const std::int64_t id = p.ids[row], position = p.positions[row];
    const std::int32_t before = p.before[row];
    const bool known = id >= 0 && id < p.vocabulary;

    const auto copy = [&](auto nan) {
        using Word = decltype(nan);
        const auto* from = reinterpret_cast<const Word*>(static_cast<const char*>(p.embedding) + id * p.hidden_bytes);
        auto* to = reinterpret_cast<Word*>(static_cast<char*>(p.hidden) + row * p.hidden_bytes);
        for (int i = threadIdx.x; i < p.hidden_bytes / static_cast<int>(sizeof(Word)); i += kThreads)
            to[i] = known ? from[i] : nan;
    };
    if (p.hidden_bytes % 16 == 0 && reinterpret_cast<std::uintptr_t>(p.embedding) % 16 == 0)
        copy(uint4{~0u, ~0u, ~0u, ~0u});
    else
        copy(static_cast<unsigned short>(0xffff));

    const int half = p.rotary_dim / 2, element = p.dtype == DType::kFloat32 ? 4 : 2;
    void* cosines = static_cast<char*>(p.cos) + static_cast<std::int64_t>(row) * p.rotary_dim * element;
    void* sines = static_cast<char*>(p.sin) + static_cast<std::int64_t>(row) * p.rotary_dim * element;
    for (int i = threadIdx.x; i < half; i += kThreads) {
        const float angle = __fmul_rn(static_cast<float>(position), p.inverse_frequency[i]);
        const float c = __fmul_rn(cosf(angle), p.scaling), s = __fmul_rn(sinf(angle), p.scaling);
        store(cosines, i, c, p.dtype), store(cosines, i + half, c, p.dtype);
        store(sines, i, s, p.dtype), store(sines, i + half, s, p.dtype);
    }

    __syncthreads();  // everybody has read what moves on now
    if (threadIdx.x == 0) {
        const int page = before / p.page_size;
        p.lengths[row] = before + 1;
        p.slots[row] = page < p.width ? static_cast<std::int64_t>(p.table[static_cast<std::int64_t>(row) * p.width + page]) *
                                                p.page_size + before % p.page_size
                                      : -1;
        if (p.advance) p.before[row] = before + 1, p.positions[row] = position + 1;
    }
}

}  // namespace

cudaError_t begin_step(const BeginStepParams& p, cudaStream_t stream) {
    if (p.batch < 1 || p.page_size < 1 || p.rotary_dim % 2 != 0 || p.hidden_bytes % 2 != 0) return cudaErrorInvalidValue;
    return launch(begin_step_kernel, dim3(static_cast<unsigned>(p.batch)), dim3(kThreads), 0, stream, p);
}

}  // namespace quarot
