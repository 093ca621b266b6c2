// rope_kv_append: what lies between the QKV projection and decode attention, in one pass over the row (rope_row.cuh).
#include "kv_cache/rope_kv_append.h"

#include "kv_cache/rope_row.cuh"

namespace quarot {
namespace {

constexpr int kWarps = 4;
constexpr int kRehearsalTokens = 8;  // up to here the projection ahead leaves room for this kernel beside it

__device__ __forceinline__ void store_two(void* row, DType dtype, int dim, float a, float b) {
    if (dtype == DType::kFloat32) {
        *reinterpret_cast<float2*>(static_cast<float*>(row) + dim) = {a, b};
    } else if (dtype == DType::kFloat16) {
        *reinterpret_cast<__half2*>(static_cast<__half*>(row) + dim) = __floats2half2_rn(a, b);
    } else {
        *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(row) + dim) = __floats2bfloat162_rn(a, b);
    }
}

// A warp has one of the Hq + 2 Hkv heads of kRowsPerWarp tokens, eight lanes a row. Warps go through the heads first, then
// the tokens; kWarps of them are a block, whatever lies in it.
//
// In a decode step of few tokens (one_each) the block has its place long before the projection ahead has ended, and what
// runs once waits for its instructions: so it goes through all of it beforehand, on zeros, and stores nothing.
template <int D, int Bits, int Groups>
__global__ void __launch_bounds__(32 * kWarps) rope_append_kernel(const __grid_constant__ RopeAppendParams p) {
    // Decode attention reads the pages of all but a sequence's last token before it waits for us.
    if (p.one_each) pdl_trigger();
    __shared__ __align__(16) float zeros[D];
    for (int i = threadIdx.x; i < D; i += 32 * kWarps) zeros[i] = 0.0f;
    __syncthreads();
    const int lane = threadIdx.x % 32, place = lane % 8;
    const int heads = p.query_heads + 2 * p.kv_heads;
    const unsigned warp = blockIdx.x * kWarps + threadIdx.x / 32;  // fewer than 2^31: so says the grid
    const int head = static_cast<int>(warp % heads), token = static_cast<int>(warp / heads) * kRowsPerWarp + lane / 8;
    const bool is_query = head < p.query_heads, is_value = head >= p.query_heads + p.kv_heads;
#pragma unroll 1
    for (bool earnest = !p.one_each || p.tokens > kRehearsalTokens;; earnest = true) {
        const bool valid = earnest && token < p.tokens;
        if (earnest) pdl_wait();
        const int slot = is_query || !earnest ? -1 : load_slot(p, token);
        float x[D / 8];
        load_head<D>(p, valid ? token : 0, head, place, x, earnest ? nullptr : zeros);
        if (is_query) {
            if (valid) {
                const int element = p.dtype == DType::kFloat32 ? 4 : 2;
                void* target = static_cast<std::uint8_t*>(p.query) +
                               (static_cast<std::int64_t>(token) * p.query_heads + head) * D * element;
#pragma unroll
                for (int i = 0; i < D / 16; ++i)
                    store_two(target, p.dtype, 16 * i + 2 * place, x[2 * i], x[2 * i + 1]);
            }
        } else {
            const int kv_head = head - p.query_heads - (is_value ? p.kv_heads : 0);
            quantize_and_store_row<D, Bits, Groups>(p, !is_value, slot, kv_head, x, lane);
        }
        if (earnest) break;
    }
}

template <int D, int Bits, int Groups>
cudaError_t launch_rows(const RopeAppendParams& p, cudaStream_t stream) {
    const std::int64_t warps = (static_cast<std::int64_t>(p.tokens) + kRowsPerWarp - 1) / kRowsPerWarp *
                               (p.query_heads + 2 * p.kv_heads);
    return launch(rope_append_kernel<D, Bits, Groups>, dim3(static_cast<unsigned>((warps + kWarps - 1) / kWarps)),
                  dim3(32 * kWarps), 0, stream, p);
}

using Launcher = cudaError_t (*)(const RopeAppendParams&, cudaStream_t);

Launcher find_launcher(const KVFormat& f, int rotary_dim) {
    if (f.key_bits != f.value_bits || f.key_group != f.value_group || rotary_dim % 32 || rotary_dim > f.head_dim)
        return nullptr;
    const int groups = f.head_dim / f.key_group;
    const struct { int dim, bits, groups; Launcher launcher; } table[] = {
        {64, 4, 1, launch_rows<64, 4, 1>},   {64, 4, 2, launch_rows<64, 4, 2>},   {64, 8, 1, launch_rows<64, 8, 1>},
        {128, 4, 1, launch_rows<128, 4, 1>}, {128, 4, 2, launch_rows<128, 4, 2>}, {128, 4, 4, launch_rows<128, 4, 4>},
        {128, 8, 1, launch_rows<128, 8, 1>}, {128, 2, 1, launch_rows<128, 2, 1>}, {256, 4, 1, launch_rows<256, 4, 1>},
        {256, 4, 2, launch_rows<256, 4, 2>}, {256, 8, 1, launch_rows<256, 8, 1>},
    };
    for (const auto& row : table)
        if (row.dim == f.head_dim && row.bits == f.key_bits && row.groups == groups) return row.launcher;
    return nullptr;
}

}  // namespace

bool rope_kv_append_serves(const KVFormat& format, int rotary_dim) {
    return find_launcher(format, rotary_dim) != nullptr;
}

cudaError_t rope_kv_append(const RopeAppendParams& p, cudaStream_t stream) {
    const Launcher launcher = find_launcher(p.format, p.rotary_dim);
    if (launcher == nullptr) return cudaErrorInvalidValue;
    return p.tokens == 0 ? cudaSuccess : launcher(p, stream);
}

}  // namespace quarot
