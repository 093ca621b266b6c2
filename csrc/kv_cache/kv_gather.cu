// kv_gather: tokens of the packed pages back to floating point, one thread an element pair. Not a hot path.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/launch.cuh"
#include "kv_cache/kv_append.h"
#include "kv_cache/layout.cuh"

namespace quarot {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ void store(void* out, DType dtype, std::int64_t i, float x) {
    if (dtype == DType::kFloat32) static_cast<float*>(out)[i] = x;
    if (dtype == DType::kFloat16) static_cast<__half*>(out)[i] = __float2half_rn(x);
    if (dtype == DType::kBFloat16) static_cast<__nv_bfloat16*>(out)[i] = __float2bfloat16_rn(x);
}

__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherParams p) {
    pdl_wait();
    const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int dims = p.format.head_dim;
    const std::int64_t row = index / dims;
    if (row >= static_cast<std::int64_t>(p.tokens) * p.kv_heads) return;
    const int dim = static_cast<int>(index % dims), head = static_cast<int>(row % p.kv_heads);
    const std::int64_t slot = p.slots[row / p.kv_heads];
    const Side side = blockIdx.y == 0 ? Side::kKey : Side::kValue;
    const int page_size = p.page_blocks * kBlockTokens, bits = p.format.bits(side);
    float x = 0.0f;
    if (slot >= 0 && slot < static_cast<std::int64_t>(p.num_pages) * page_size) {
        const int offset = static_cast<int>(slot % page_size), token = offset % kBlockTokens;
        const std::uint8_t* block =
            p.pool + ((slot / page_size * p.kv_heads + head) * p.page_blocks + offset / kBlockTokens) *
                         p.format.block_bytes();
        const unsigned code = read_code(block + p.format.code_offset(side), side, dims, bits, token, dim);
        if (bits == 16) {
            x = p.dtype == DType::kBFloat16 ? __uint_as_float(code << 16)
                                            : __half2float(__ushort_as_half(static_cast<unsigned short>(code)));
        } else {
            const float2 sb = __half22float2(reinterpret_cast<const __half2*>(
                block + p.format.param_offset(side))[kBlockTokens * (dim / p.format.group(side)) + token]);
            x = __fadd_rn(__fmul_rn(static_cast<float>(code), sb.x), sb.y);
        }
    }
    store(side == Side::kKey ? p.key : p.value, p.dtype, index, x);
    pdl_trigger();
}

}  // namespace

cudaError_t kv_gather(const GatherParams& p, cudaStream_t stream) {
    const std::int64_t elements = static_cast<std::int64_t>(p.tokens) * p.kv_heads * p.format.head_dim;
    if (elements == 0) return cudaSuccess;
    const auto blocks = static_cast<unsigned>((elements + kThreads - 1) / kThreads);
    return launch(gather_kernel, dim3(blocks, 2), dim3(kThreads), 0, stream, p);
}

}  // namespace quarot
