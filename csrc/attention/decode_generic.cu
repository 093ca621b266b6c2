// Decode attention for every format without a tensor-core variant: same work split and merge, plain float32 arithmetic.
//
// A CTA dequantises one block of 16 tokens at a time into shared memory. Limited by the unpacking (about 1/20 of the
// speed of the tensor-core kernels); it exists so that no format of the layout falls back to PyTorch on the GPU.
#include "attention/decode_kernel.cuh"
#include "attention/variants.h"
#include "kv_cache/layout.cuh"

namespace quarot {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxHeadDim = 256;
constexpr int kOutputs = kTileRows * kMaxHeadDim / kThreads;  // of a thread

// Keys or values of a block as float32 [16, D + 1] (odd stride: no bank conflicts); tokens past `tokens` become 0.
__device__ void fill_block(float* out, const std::uint8_t* block, const KVFormat& f, Side side, bool bf16, int tokens) {
    const int bits = f.bits(side), stride = f.head_dim + 1;
    const std::uint8_t* codes = block + f.code_offset(side);
    const auto* params = reinterpret_cast<const __half2*>(block + f.param_offset(side));
    for (int index = threadIdx.x; index < kBlockTokens * f.head_dim; index += kThreads) {
        const int token = index / f.head_dim, dim = index % f.head_dim;
        float x = 0.0f;
        if (token < tokens) {
            const unsigned code = read_code(codes, side, f.head_dim, bits, token, dim);
            if (bits == 16) {
                x = bf16 ? __uint_as_float(code << 16) : __half2float(__ushort_as_half(static_cast<unsigned short>(code)));
            } else {
                const float2 sb = __half22float2(params[kBlockTokens * (dim / f.group(side)) + token]);
                x = static_cast<float>(code) * sb.x + sb.y;
            }
        }
        out[token * stride + dim] = x;
    }
}

// Shared memory: query [8, D] | keys [16, D + 1] | values [16, D + 1] | score [8, 16] | scratch [8, D] when rotating.
__global__ void __launch_bounds__(kThreads)
    decode_generic_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ KVFormat f) {
    extern __shared__ float shared_floats[];
    __shared__ float row_max[kTileRows], row_sum[kTileRows], factor[kTileRows];
    __shared__ int last_flag;
    const int dims = f.head_dim, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* query = shared_floats;
    float* keys = query + kTileRows * dims;
    float* values = keys + kBlockTokens * (dims + 1);
    float* score = values + kBlockTokens * (dims + 1);
    float* scratch = score + kTileRows * kBlockTokens;
    const int split = blockIdx.x, kv_head = blockIdx.y / p.tiles, tile = blockIdx.y % p.tiles;
    const int group = p.query_heads / p.kv_heads, rows = p.tokens * group;
    const int tile_rows = min(kTileRows, rows - tile * kTileRows);
    const bool bf16 = p.dtype == DType::kBFloat16;
    pdl_wait();
    pdl_trigger();
    const Work work = plan_work(p, blockIdx.z, split, kBlockTokens, lane);
    if (work.splits == 0 ? split != 0 : split >= work.splits) return;
    const int element = p.dtype == DType::kFloat32 ? 4 : 2;
    for (int r = warp; r < kTileRows; r += kThreads / 32) {
        const std::int64_t source = output_row(p, work.sequence, kv_head, tile * kTileRows + min(r, tile_rows - 1)) * dims;
        for (int i = lane; i < dims; i += 32)
            query[r * dims + i] =
                load_as_float(static_cast<const std::uint8_t*>(p.query) + source * element, p.dtype, i);
        if (p.rotate_order != 0)
            rotate_row(query + r * dims, scratch + r * dims, p.rotation_signs, p.rotate_order, p.rotate_pow2, lane);
    }
    if (threadIdx.x < kTileRows) row_max[threadIdx.x] = kMasked, row_sum[threadIdx.x] = 0.0f;

    float out[kOutputs];  // element threadIdx.x + kThreads * i of [8, D]
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
    const int first_end = work.length - p.tokens + 1;
    for (int stage = work.first; stage < work.last; ++stage) {
        const int id = p.page_table[static_cast<std::int64_t>(work.sequence) * p.max_pages + stage / p.page_blocks];
        const std::int64_t page = min(max(id, 0), p.num_pages - 1);
        const std::uint8_t* block =
            p.pool + ((page * p.kv_heads + kv_head) * p.page_blocks + stage % p.page_blocks) * f.block_bytes();
        const int tokens = min(kBlockTokens, work.length - stage * kBlockTokens);
        __syncthreads();
        fill_block(keys, block, f, Side::kKey, bf16, tokens);
        fill_block(values, block, f, Side::kValue, bf16, tokens);
        __syncthreads();
        {  // warp = query row, two lanes a token
            const int token = lane / 2, position = stage * kBlockTokens + token;
            float dot = 0.0f;
            for (int i = lane % 2; i < dims; i += 2) dot += query[warp * dims + i] * keys[token * (dims + 1) + i];
            dot += __shfl_xor_sync(kFullWarp, dot, 1);
            const int end = first_end + (tile * kTileRows + min(warp, tile_rows - 1)) / group;
            const bool visible =
                token < tokens && position < end && (p.window <= 0 || position >= end - p.window);
            const float s = visible ? dot * p.scale_log2 : kMasked;
            float peak = s;
#pragma unroll
            for (int distance = 2; distance < 32; distance *= 2)
                peak = fmaxf(peak, __shfl_xor_sync(kFullWarp, peak, distance));
            const float before = row_max[warp], updated = fmaxf(before, peak);
            const float weight = visible ? exp2f(s - updated) : 0.0f;
            float total = weight;
#pragma unroll
            for (int distance = 2; distance < 32; distance *= 2)
                total += __shfl_xor_sync(kFullWarp, total, distance);
            if (lane % 2 == 0) score[warp * kBlockTokens + token] = weight;
            __syncwarp();
            if (lane == 0) {
                factor[warp] = exp2f(before - updated);
                row_sum[warp] = row_sum[warp] * factor[warp] + total;
                row_max[warp] = updated;
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) {
            const int index = threadIdx.x + kThreads * i;
            if (index >= kTileRows * dims) break;
            const int r = index / dims, dim = index % dims;
            float total = out[i] * factor[r];
            for (int token = 0; token < kBlockTokens; ++token)
                total += score[r * kBlockTokens + token] * values[token * (dims + 1) + dim];
            out[i] = total;
        }
    }
    __syncthreads();

    const std::int64_t item =
        static_cast<std::int64_t>(work.sequence) * (p.kv_heads * p.tiles) + kv_head * p.tiles + tile;
    const auto write = [&](int r, int dim, float value, float peak, float sum) {
        const std::int64_t target = output_row(p, work.sequence, kv_head, tile * kTileRows + r);
        const float x = sum > 0.0f ? value / sum : 0.0f;
        if (p.dtype == DType::kFloat32) static_cast<float*>(p.out)[target * dims + dim] = x;
        if (p.dtype == DType::kFloat16) static_cast<__half*>(p.out)[target * dims + dim] = __float2half_rn(x);
        if (bf16) static_cast<__nv_bfloat16*>(p.out)[target * dims + dim] = __float2bfloat16_rn(x);
        if (dim == 0) p.lse[target] = finish_lse(peak, sum, 0.0f);
    };
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
        const int index = threadIdx.x + kThreads * i;
        if (index >= tile_rows * dims) break;
        const int r = index / dims, dim = index % dims;
        if (work.splits <= 1) {
            write(r, dim, out[i], row_max[r], row_sum[r]);
        } else {
            const std::int64_t slot = (item * p.max_splits + split) * kTileRows + r;
            __stcg(p.partial + slot * dims + dim, out[i]);
            if (dim == 0) __stcg(reinterpret_cast<float2*>(p.partial_max_sum) + slot, float2{row_max[r], row_sum[r]});
        }
    }
    if (work.splits <= 1) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last_flag = atomicAdd(p.counters + item, 1) == work.splits - 1;
    __syncthreads();
    if (!last_flag) return;
    if (threadIdx.x == 0) p.counters[item] = 0;
    __threadfence();
    for (int index = threadIdx.x; index < tile_rows * dims; index += kThreads) {
        const int r = index / dims, dim = index % dims;
        const std::int64_t slot = item * p.max_splits * kTileRows + r;
        float peak = kMasked, sum = 0.0f, total = 0.0f;
        const auto* max_sum = reinterpret_cast<const float2*>(p.partial_max_sum) + slot;
        for (int s = 0; s < work.splits; ++s) peak = fmaxf(peak, __ldcg(&max_sum[s * kTileRows]).x);
        for (int s = 0; s < work.splits; ++s) {
            const float2 ms = __ldcg(&max_sum[s * kTileRows]);
            const float weight = exp2f(ms.x - peak);
            sum += weight * ms.y;
            total += weight * __ldcg(p.partial + (slot + s * kTileRows) * dims + dim);
        }
        write(r, dim, total, peak, sum);
    }
}

}  // namespace

cudaError_t launch_generic_decode(const KVFormat& format, const DecodeParams& p, cudaStream_t stream) {
    const int rotate_floats = p.rotate_order != 0 ? kTileRows * format.head_dim : 0;
    const std::size_t bytes = sizeof(float) * (kTileRows * format.head_dim + 2 * kBlockTokens * (format.head_dim + 1) +
                                               kTileRows * kBlockTokens + rotate_floats);
    const cudaError_t status =
        cudaFuncSetAttribute(decode_generic_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 * 1024);
    if (status != cudaSuccess) return status;
    return launch(decode_generic_kernel, dim3(p.max_splits, p.kv_heads * p.tiles, p.batch), dim3(kThreads), bytes,
                  stream, p, format);
}

}  // namespace quarot
