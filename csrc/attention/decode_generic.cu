// Decode attention for every format without a tensor-core variant: same work split and merge, plain float32 arithmetic.
//
// A CTA dequantises one block of 16 tokens at a time into shared memory. Limited by the unpacking and
// the scalar arithmetic; it exists so that no format of the layout falls back to PyTorch on the GPU.
#include "attention/decode_kernel.cuh"
#include "attention/variants.h"
#include "kv_cache/layout.cuh"

namespace quarot {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxHeadDim = 256;
constexpr int kOutputs = kTileRows * kMaxHeadDim / kThreads;  // of a thread

// Bit address of every (token, dim) in its plane, uint16 [16, D]: computed once a CTA instead of once a code.
__device__ void fill_addresses(std::uint16_t* table, const KVFormat& f, Side side, int width) {
    const int chunk_width = f.bits(side) == 3 ? 2 : f.bits(side);
    for (int index = threadIdx.x; index < kBlockTokens * f.head_dim; index += kThreads)
        table[index] = static_cast<std::uint16_t>(
            bit_address(side, f.head_dim, width, chunk_width, index / f.head_dim, index % f.head_dim));
}

// Keys or values of a block in shared memory as float32 [16, D + 1] (odd stride: no bank conflicts); tokens from `tokens`
// on become 0. `high`: addresses of the 1-bit plane of 3 bits.
__device__ void dequantize_block(float* out, const std::uint8_t* block, const KVFormat& f, Side side,
                                 const std::uint16_t* low, const std::uint16_t* high, bool bf16, int tokens) {
    const int bits = f.bits(side), width = bits == 3 ? 2 : bits, dims = f.head_dim;
    const std::uint8_t* codes = block + f.code_offset(side);
    // Threads are dims, as many tokens side by side as fit.
    const int step = kThreads / dims, dim = threadIdx.x % dims, first = threadIdx.x / dims;
    if (first >= step) return;
    const auto* params = reinterpret_cast<const __half2*>(block + f.param_offset(side)) +
                         (bits == 16 ? 0 : kBlockTokens * (dim / f.group(side)));
    const unsigned mask = (1u << width) - 1;
#pragma unroll 4
    for (int token = first; token < kBlockTokens; token += step) {
        const int index = token * dims + dim, address = low[index];
        float x = 0.0f;
        if (token < tokens && bits == 16) {
            const unsigned short raw = *reinterpret_cast<const unsigned short*>(codes + address / 8);
            x = bf16 ? __uint_as_float(static_cast<unsigned>(raw) << 16) : __half2float(__ushort_as_half(raw));
        } else if (token < tokens) {
            unsigned code = codes[address / 8] >> (address % 8) & mask;
            if (bits == 3) code |= (codes[4 * dims + high[index] / 8] >> (high[index] % 8) & 1u) << 2;
            const float2 sb = __half22float2(params[token]);
            x = static_cast<float>(code) * sb.x + sb.y;
        }
        out[token * (dims + 1) + dim] = x;
    }
}

// A block of the pool into shared memory, asynchronously, by all threads.
__device__ __forceinline__ void fetch_block(std::uint8_t* target, const DecodeParams& p, const KVFormat& f,
                                            const Work& work, int kv_head, int stage) {
    const int id = p.page_table[static_cast<std::int64_t>(work.sequence) * p.max_pages + stage / p.page_blocks];
    const std::int64_t page = min(max(id, 0), p.num_pages - 1);
    const std::uint8_t* source =
        p.pool + ((page * p.kv_heads + kv_head) * p.page_blocks + stage % p.page_blocks) * f.block_bytes();
    const auto base = static_cast<std::uint32_t>(__cvta_generic_to_shared(target));
    for (int i = 16 * threadIdx.x; i < f.block_bytes(); i += 16 * kThreads)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(base + i), "l"(source + i) : "memory");
}

struct GenericShared {
    float *query, *keys, *values, *score, *scratch;
    std::uint8_t* block[2];
    std::uint16_t* addresses[2][2];  // side, plane
    int bytes;

    __host__ __device__ GenericShared(std::uint8_t* base, const KVFormat& f) {
        int at = 0;
        const auto take = [&](int size) {
            std::uint8_t* p = base + at;
            at += (size + 15) / 16 * 16;
            return p;
        };
        block[0] = take(f.block_bytes()), block[1] = take(f.block_bytes());
        query = reinterpret_cast<float*>(take(4 * kTileRows * f.head_dim));
        keys = reinterpret_cast<float*>(take(4 * kBlockTokens * (f.head_dim + 1)));
        values = reinterpret_cast<float*>(take(4 * kBlockTokens * (f.head_dim + 1)));
        score = reinterpret_cast<float*>(take(4 * kTileRows * kBlockTokens));
        scratch = keys;  // of the rotation, before there are keys
#pragma unroll
        for (int side = 0; side < 2; ++side) {
            const int planes = f.bits(static_cast<Side>(side)) == 3 ? 2 : 1;
#pragma unroll
            for (int plane = 0; plane < 2; ++plane)
                addresses[side][plane] =
                    reinterpret_cast<std::uint16_t*>(take(plane < planes ? 2 * kBlockTokens * f.head_dim : 0));
        }
        bytes = at;
    }
};

__global__ void __launch_bounds__(kThreads)
    decode_generic_kernel(const __grid_constant__ DecodeParams p, const __grid_constant__ KVFormat f) {
    extern __shared__ __align__(16) std::uint8_t shared_bytes[];
    __shared__ float row_max[kTileRows], row_sum[kTileRows], factor[kTileRows];
    __shared__ int last_flag;
    const GenericShared s(shared_bytes, f);
    const int dims = f.head_dim, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int columns = p.kv_heads * p.tiles, group = p.group, rows = p.tokens * group;
    const bool bf16 = p.dtype == DType::kBFloat16;
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        const int bits = f.bits(static_cast<Side>(side));
        fill_addresses(s.addresses[side][0], f, static_cast<Side>(side), bits == 3 ? 2 : bits);
        if (bits == 3) fill_addresses(s.addresses[side][1], f, static_cast<Side>(side), 1);
    }
    pdl_wait();
    pdl_trigger();
    for (int k = 0;; ++k) {
        const Work work = find_work(p, item_index(k), kBlockTokens, lane);
        if (work.sequence < 0) return;
        __syncthreads();
        const int kv_head = work.column / p.tiles, tile = work.column % p.tiles;
        const int tile_rows = min(kTileRows, rows - tile * kTileRows);
        const int element = p.dtype == DType::kFloat32 ? 4 : 2;
        for (int r = warp; r < kTileRows; r += kThreads / 32) {
            const std::int64_t source =
                output_row(p, work.sequence, kv_head, tile * kTileRows + min(r, tile_rows - 1)) * dims;
            for (int i = lane; i < dims; i += 32)
                s.query[r * dims + i] =
                    load_as_float(static_cast<const std::uint8_t*>(p.query) + source * element, p.dtype, i);
            if (p.rotate_order != 0)
                rotate_row(s.query + r * dims, s.scratch + r * dims, p.rotation_signs, p.rotate_order, p.rotate_pow2,
                           lane);
        }
        if (threadIdx.x < kTileRows) row_max[threadIdx.x] = kMasked, row_sum[threadIdx.x] = 0.0f;

        float out[kOutputs];  // element threadIdx.x + kThreads * i of [8, D]
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) out[i] = 0.0f;
        const int first_end = p.causal ? work.length - p.tokens + 1 : work.length;
        if (work.first < work.last) fetch_block(s.block[0], p, f, work, kv_head, work.first);
        for (int stage = work.first; stage < work.last; ++stage) {
            const int tokens = min(kBlockTokens, work.length - stage * kBlockTokens);
            std::uint8_t* current = s.block[(stage - work.first) % 2 ? 1 : 0];
            asm volatile("cp.async.wait_all;" ::: "memory");
            __syncthreads();
            if (stage + 1 < work.last) fetch_block(s.block[(stage - work.first) % 2 ? 0 : 1], p, f, work, kv_head, stage + 1);
            dequantize_block(s.keys, current, f, Side::kKey, s.addresses[0][0], s.addresses[0][1], bf16, tokens);
            dequantize_block(s.values, current, f, Side::kValue, s.addresses[1][0], s.addresses[1][1], bf16, tokens);
            __syncthreads();
            {  // warp = query row, two lanes a token
                const int token = lane / 2, position = stage * kBlockTokens + token;
                float dots[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                for (int i = lane % 2; i < dims; i += 8) {  // head_dim is a multiple of 16
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        dots[j] += s.query[warp * dims + i + 2 * j] * s.keys[token * (dims + 1) + i + 2 * j];
                }
                float dot = (dots[0] + dots[1]) + (dots[2] + dots[3]);
                dot += __shfl_xor_sync(kFullWarp, dot, 1);
                const int end = first_end + (p.causal ? (tile * kTileRows + min(warp, tile_rows - 1)) / group : 0);
                const bool visible =
                    token < tokens && position < end && (p.window <= 0 || position >= end - p.window);
                const float score = visible ? dot * p.scale_log2 : kMasked;
                float peak = score;
#pragma unroll
                for (int distance = 2; distance < 32; distance *= 2)
                    peak = fmaxf(peak, __shfl_xor_sync(kFullWarp, peak, distance));
                const float before = row_max[warp], updated = fmaxf(before, peak);
                const float weight = visible ? exp2f(score - updated) : 0.0f;
                float total = weight;
#pragma unroll
                for (int distance = 2; distance < 32; distance *= 2)
                    total += __shfl_xor_sync(kFullWarp, total, distance);
                if (lane % 2 == 0) s.score[warp * kBlockTokens + token] = weight;
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
#pragma unroll
                for (int token = 0; token < kBlockTokens; ++token)
                    total += s.score[r * kBlockTokens + token] * s.values[token * (dims + 1) + dim];
                out[i] = total;
            }
        }
        __syncthreads();

        const auto write = [&](int r, int dim, float value, float peak, float sum) {
            const std::int64_t target = output_row(p, work.sequence, kv_head, tile * kTileRows + r);
            const float x = sum > 0.0f ? value / sum : 0.0f;
            if (p.dtype == DType::kFloat32) static_cast<float*>(p.out)[target * dims + dim] = x;
            if (p.dtype == DType::kFloat16) static_cast<__half*>(p.out)[target * dims + dim] = __float2half_rn(x);
            if (bf16) static_cast<__nv_bfloat16*>(p.out)[target * dims + dim] = __float2bfloat16_rn(x);
            if (dim == 0) p.lse[target] = finish_lse(peak, sum, 0.0f);
        };
        const auto slot_of = [&](int split, int r) {
            return static_cast<std::int64_t>(work.base + split * columns + work.column) * kTileRows + r;
        };
#pragma unroll
        for (int i = 0; i < kOutputs; ++i) {
            const int index = threadIdx.x + kThreads * i;
            if (index >= tile_rows * dims) break;
            const int r = index / dims, dim = index % dims;
            if (work.splits == 1) {
                write(r, dim, out[i], row_max[r], row_sum[r]);
            } else {
                const std::int64_t slot = slot_of(work.split, r);
                __stcg(p.partial + slot * dims + dim, out[i]);
                if (dim == 0)
                    __stcg(reinterpret_cast<float2*>(p.partial_max_sum) + slot, float2{row_max[r], row_sum[r]});
            }
        }
        if (work.splits > 1) {
            int* counter = p.counters + work.base + work.column;
            __syncthreads();
            if (threadIdx.x == 0) {
                const bool last = arrive(counter) == work.splits - 1;
                if (last) *counter = 0;
                last_flag = last;
            }
            __syncthreads();
            for (int index = threadIdx.x; last_flag && index < tile_rows * dims; index += kThreads) {
                const int r = index / dims, dim = index % dims;
                float peak = kMasked, sum = 0.0f, total = 0.0f;
                const auto* max_sum = reinterpret_cast<const float2*>(p.partial_max_sum);
                for (int split = 0; split < work.splits; ++split)
                    peak = fmaxf(peak, __ldcg(max_sum + slot_of(split, r)).x);
                for (int split = 0; split < work.splits; ++split) {
                    const float2 ms = __ldcg(max_sum + slot_of(split, r));
                    const float weight = exp2f(ms.x - peak);
                    sum += weight * ms.y;
                    total += weight * __ldcg(p.partial + slot_of(split, r) * dims + dim);
                }
                write(r, dim, total, peak, sum);
            }
        }
        if (item_index(k + 1) >= work.items) return;
    }
}

}  // namespace

cudaError_t launch_generic_decode(const KVFormat& format, int grid, const DecodeParams& p, cudaStream_t stream) {
    const int bytes = GenericShared(nullptr, format).bytes;
    return launch(decode_generic_kernel, dim3(grid), dim3(kThreads), bytes, stream, p, format);
}

}  // namespace quarot
