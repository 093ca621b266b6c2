// kv_append: rotate (keys), quantise and write packed pages. Two kernels: a tuned one for whole-register rows and a
// generic one, a warp per row, for every other format. NOTES.md beside this has the byte counts.
#include "kv_cache/kv_append.h"

#include "attention/rotate_query.cuh"
#include "device/launch.cuh"
#include "kv_cache/append_rows.cuh"
#include "kv_cache/append_tile.cuh"
#include "kv_cache/layout.cuh"
#include "kv_cache/quantize_group.cuh"

namespace quarot {
namespace {

constexpr int kGenericWarps = 4;

// Codes of a row in shared memory and its params (16 half2 apart), by one warp.
template <int Bits>
__device__ __forceinline__ void quantize_row(const float* row, std::uint8_t* codes, __half2* params, int dims, int group,
                                             float clip, int lane) {
    for (int start = 0; start < dims; start += group, params += kBlockTokens) {
        float low = row[start], high = low;
        for (int i = lane; i < group; i += 32)
            low = min_nan(low, row[start + i]), high = max_nan(high, row[start + i]);
        for (int distance = 16; distance > 0; distance /= 2) {
            low = min_nan(low, __shfl_xor_sync(0xffffffffu, low, distance));
            high = max_nan(high, __shfl_xor_sync(0xffffffffu, high, distance));
        }
        const GroupQuantizer<Bits> quantizer(low, high, clip);
        for (int i = lane; i < group; i += 32)
            codes[start + i] = static_cast<std::uint8_t>(quantizer.code(row[start + i]));
        if (lane == 0) *params = quantizer.params();
    }
}

// A warp per (token, head, key or value); the row passes through shared memory as float32.
__global__ void __launch_bounds__(32 * kGenericWarps) append_generic_kernel(const __grid_constant__ AppendParams p) {
    extern __shared__ float shared[];
    pdl_wait();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, dims = p.format.head_dim;
    float* row = shared + warp * (2 * dims + dims / 4);
    float* scratch = row + dims;
    auto* codes = reinterpret_cast<std::uint8_t*>(scratch + dims);
    const std::int64_t item = static_cast<std::int64_t>(blockIdx.x) * kGenericWarps + warp;
    const int head = static_cast<int>(item / 2 % p.kv_heads);
    const int token = static_cast<int>(item / 2 / p.kv_heads);
    const Side side = item % 2 ? Side::kValue : Side::kKey;
    if (token >= p.tokens) return;
    const int slot = load_slot(p, token);
    if (slot < 0) return;

    const bool key = side == Side::kKey;
    const std::int64_t start = key ? token * p.key_token_stride + head * p.key_head_stride
                                   : token * p.value_token_stride + head * p.value_head_stride;
    const void* source = key ? p.key : p.value;
    const int element = p.dtype == DType::kFloat32 ? 4 : 2;
    const void* input = static_cast<const std::uint8_t*>(source) + start * element;
    for (int i = lane; i < dims; i += 32) row[i] = load_as_float(input, p.dtype, i);
    if (key && p.rotate_order != 0) rotate_row(row, scratch, p.rotation_signs, p.rotate_order, p.rotate_pow2, lane);
    __syncwarp();

    const int bits = p.format.bits(side), place = slot % kBlockTokens;
    std::uint8_t* block = slot_block(p, slot, head, p.format.block_bytes());
    std::uint8_t* plane = block + p.format.code_offset(side);
    if (bits == 16) {
        const bool bf16 = p.dtype == DType::kBFloat16;
        store_plane(plane, side, dims, 16, 16, place, lane, 32,
                    [&](int dim) -> unsigned {
                        // Not through float where nothing was computed: keeps the bits of a NaN.
                        if (element == 2 && !(key && p.rotate_order != 0))
                            return static_cast<const std::uint16_t*>(input)[dim];
                        return raw_word(row[dim], bf16);
                    });
        return;
    }
    const float clip = key ? p.key_clip : p.value_clip;
    __half2* params = reinterpret_cast<__half2*>(block + p.format.param_offset(side)) + place;
    switch (bits) {
        case 2: quantize_row<2>(row, codes, params, dims, p.format.group(side), clip, lane); break;
        case 3: quantize_row<3>(row, codes, params, dims, p.format.group(side), clip, lane); break;
        case 4: quantize_row<4>(row, codes, params, dims, p.format.group(side), clip, lane); break;
        default: quantize_row<8>(row, codes, params, dims, p.format.group(side), clip, lane); break;
    }
    __syncwarp();
    const int width = bits == 3 ? 2 : bits;
    const unsigned mask = (1u << width) - 1;
    store_plane(plane, side, dims, width, width, place, lane, 32,
                [&](int dim) -> unsigned { return codes[dim] & mask; });
    if (bits == 3)
        store_plane(plane + 4 * dims, side, dims, 1, 2, place, lane, 32,
                    [&](int dim) -> unsigned { return codes[dim] >> 2; });
}

// From this many tokens on a warp takes 8 of them; below, 4: more warps, each shorter.
constexpr int kTileFrom = 64;

template <int D, int Bits, int Groups>
cudaError_t launch_rows(const AppendParams& p, cudaStream_t stream) {
    constexpr int kWarps = 4;
    if constexpr (D <= 128 && Bits >= 4 && D / Groups >= 32) {
        if (p.tokens >= kTileFrom) {
            constexpr int kTokens = kWarps * kTileTokens;
            const auto blocks = static_cast<unsigned>((p.tokens + kTokens - 1) / kTokens);
            return launch(append_tile_kernel<D, Bits, Groups, kWarps>, dim3(blocks, p.kv_heads, 2), dim3(32 * kWarps), 0,
                          stream, p);
        }
    }
    constexpr int kTokens = kWarps * kRowsPerWarp;
    const auto blocks = static_cast<unsigned>((p.tokens + kTokens - 1) / kTokens);
    return launch(append_rows_kernel<D, Bits, Groups, kWarps>, dim3(blocks, p.kv_heads, 2), dim3(32 * kWarps), 0,
                  stream, p);
}

template <int D, int Bits>
cudaError_t launch_groups(const AppendParams& p, cudaStream_t stream, bool& served) {
    switch (p.format.head_dim / p.format.key_group) {
        case 1: return launch_rows<D, Bits, 1>(p, stream);
        case 2: return launch_rows<D, Bits, 2>(p, stream);
        case 4: if constexpr (D >= 128) return launch_rows<D, Bits, 4>(p, stream);
    }
    served = false;
    return cudaSuccess;
}

template <int D>
cudaError_t launch_bits(const AppendParams& p, cudaStream_t stream, bool& served) {
    switch (p.format.key_bits) {
        case 4: return launch_groups<D, 4>(p, stream, served);
        case 8: return launch_groups<D, 8>(p, stream, served);
    }
    if constexpr (D % 128 == 0)
        if (p.format.key_bits == 2) return launch_groups<D, 2>(p, stream, served);
    served = false;
    return cudaSuccess;
}

cudaError_t launch_tuned(const AppendParams& p, cudaStream_t stream, bool& served) {
    const KVFormat& f = p.format;
    served = f.key_bits == f.value_bits && f.key_group == f.value_group && p.rotate_order <= 1;
    if (!served) return cudaSuccess;
    switch (f.head_dim) {
        case 64: return launch_bits<64>(p, stream, served);
        case 128: return launch_bits<128>(p, stream, served);
        case 256: return launch_bits<256>(p, stream, served);
    }
    served = false;
    return cudaSuccess;
}

}  // namespace

cudaError_t kv_append(const AppendParams& p, bool generic, cudaStream_t stream) {
    if (p.tokens == 0) return cudaSuccess;
    bool served = !generic;
    if (served) {
        const cudaError_t status = launch_tuned(p, stream, served);
        if (served) return status;
    }
    const std::int64_t items = 2ll * p.tokens * p.kv_heads;
    const auto blocks = static_cast<unsigned>((items + kGenericWarps - 1) / kGenericWarps);
    const std::size_t shared_bytes = kGenericWarps * (2 * p.format.head_dim + p.format.head_dim / 4) * sizeof(float);
    return launch(append_generic_kernel, dim3(blocks), dim3(32 * kGenericWarps), shared_bytes, stream, p);
}

}  // namespace quarot
