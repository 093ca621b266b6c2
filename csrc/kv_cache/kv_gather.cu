// kv_gather: tokens of the packed pages back to floating point. Tiles of 8 tokens (tile.cuh) for the usual formats, as
// chunked prefill reads its past through them; a thread an element for every other.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/launch.cuh"
#include "kv_cache/append_rows.cuh"
#include "kv_cache/kv_append.h"
#include "kv_cache/layout.cuh"
#include "kv_cache/tile.cuh"

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

template <int Count>
__device__ __forceinline__ void store_some(void* out, DType dtype, std::int64_t i, const float (&x)[Count]) {
    using Wide = std::conditional_t<Count == 4, float4, float2>;
    using Narrow = std::conditional_t<Count == 4, uint2, std::uint32_t>;
    if (dtype == DType::kFloat32) {
        *reinterpret_cast<Wide*>(static_cast<float*>(out) + i) = *reinterpret_cast<const Wide*>(x);
        return;
    }
    alignas(8) std::uint32_t words[Count / 2];
#pragma unroll
    for (int k = 0; k < Count / 2; ++k) {
        if (dtype == DType::kFloat16) {
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[k]) : "f"(x[2 * k + 1]), "f"(x[2 * k]));
        } else {
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[k]) : "f"(x[2 * k + 1]), "f"(x[2 * k]));
        }
    }
    *reinterpret_cast<Narrow*>(static_cast<std::uint16_t*>(out) + i) = *reinterpret_cast<const Narrow*>(words);
}

// s * code + b of a byte of `codes`; a code behind 0x4b0000 is 2^23 + code as a float.
__device__ __forceinline__ float dequantize(std::uint32_t codes, int byte, float2 sb) {
    const float code = __uint_as_float(__byte_perm(codes, 0x4b000000u, 0x7440 | byte)) - 8388608.0f;
    return __fadd_rn(__fmul_rn(code, sb.x), sb.y);
}

template <int D, int Bits, int Groups>
struct GatherTile : Tile<D, Bits, Groups> {
    using Base = Tile<D, Bits, Groups>;
    using Base::kBlockBytes, Base::kPairs, Base::kWords, Base::kPer, Base::kChunkBytes, Base::kPieceWords;
    static constexpr std::uint32_t kMask = ((1u << Bits) - 1) * 0x01010101u;

    __device__ __forceinline__ static void load(const std::uint8_t* piece, bool stored, std::uint32_t (&words)[kWords]) {
#pragma unroll
        for (int i = 0; i < kWords; i += kPieceWords)
            *reinterpret_cast<typename Base::Vector*>(words + i) =
                stored ? *reinterpret_cast<const typename Base::Vector*>(piece + i / kPieceWords * kChunkBytes)
                       : typename Base::Vector{};
    }

    __device__ __forceinline__ static float2 params(const std::uint8_t* block, Side side, int group, int offset,
                                                    bool stored) {
        if (!stored) return {0.0f, 0.0f};
        return __half22float2(
            reinterpret_cast<const __half2*>(block + (side == Side::kKey ? Base::kKeyParams : Base::kValueParams))
                [kBlockTokens * group + offset]);
    }

    // The lane's share of a token: of every mma 4 neighbouring dims of a key, 2 of a value.
    template <Side S>
    __device__ __forceinline__ static void share(const GatherParams& p, int token, int head, int place) {
        constexpr int kCount = S == Side::kKey ? 4 : 2;
        const int slot = load_slot(p, token), offset = slot < 0 ? 0 : slot % kBlockTokens;
        const std::uint8_t* block = slot_block(p, slot < 0 ? 0 : slot, head, kBlockBytes);
        alignas(16) std::uint32_t words[kWords];
        load(S == Side::kKey ? Base::key_piece(block, offset, place) : Base::value_piece(block, offset, place), slot >= 0,
             words);
        if (token >= p.tokens) return;
        const int half = S == Side::kKey ? 0 : 16 * (offset % 2);  // of a word of values, which two tokens share
        const std::int64_t row = (static_cast<std::int64_t>(token) * p.kv_heads + head) * D + kCount * place;
#pragma unroll
        for (int mma = 0; mma < D / 16; ++mma) {
            const float2 sb = params(block, S, mma / kPer, offset, slot >= 0);
            const std::uint32_t codes = words[mma / kPairs] >> (Bits * (mma % kPairs) + half) & kMask;
            alignas(16) float x[kCount];
#pragma unroll
            for (int i = 0; i < kCount; ++i) x[i] = dequantize(codes, i, sb);
            store_some(S == Side::kKey ? p.key : p.value, p.dtype, row + 16 * mma, x);
        }
    }
};

constexpr int kTileWarps = 4;

// Grid: x = kTileWarps * 8 tokens, y = kv head, z = 0 keys, 1 values.
template <int D, int Bits, int Groups>
__global__ void __launch_bounds__(32 * kTileWarps) gather_tile_kernel(const __grid_constant__ GatherParams p) {
    using Gather = GatherTile<D, Bits, Groups>;
    pdl_wait();
    const int lane = threadIdx.x % 32;
    const int base = (blockIdx.x * kTileWarps + threadIdx.x / 32) * kTileTokens;
    if (base < p.tokens) {
        if (blockIdx.z == 0) {
            Gather::template share<Side::kKey>(p, base + lane / 4, blockIdx.y, lane % 4);
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i)
                Gather::template share<Side::kValue>(p, base + 2 * (lane % 4) + i, blockIdx.y, lane / 4);
        }
    }
    pdl_trigger();
}

template <int D, int Bits, int Groups>
cudaError_t launch_tiles(const GatherParams& p, cudaStream_t stream) {
    constexpr int kTokens = kTileWarps * kTileTokens;
    const dim3 grid(static_cast<unsigned>((p.tokens + kTokens - 1) / kTokens), p.kv_heads, 2);
    return launch(gather_tile_kernel<D, Bits, Groups>, grid, dim3(32 * kTileWarps), 0, stream, p);
}

using Launcher = cudaError_t (*)(const GatherParams&, cudaStream_t);

Launcher find_tiles(const KVFormat& f) {
    if (f.key_bits != f.value_bits || f.key_group != f.value_group) return nullptr;
    const struct { int dim, bits, group; Launcher launcher; } table[] = {
        {128, 4, 128, launch_tiles<128, 4, 1>}, {128, 4, 64, launch_tiles<128, 4, 2>},
        {128, 4, 32, launch_tiles<128, 4, 4>},  {128, 8, 128, launch_tiles<128, 8, 1>},
        {64, 4, 64, launch_tiles<64, 4, 1>},    {64, 4, 32, launch_tiles<64, 4, 2>},
        {64, 8, 64, launch_tiles<64, 8, 1>},
    };
    for (const auto& row : table)
        if (row.dim == f.head_dim && row.bits == f.key_bits && row.group == f.key_group) return row.launcher;
    return nullptr;
}

}  // namespace

cudaError_t kv_gather(const GatherParams& p, cudaStream_t stream) {
    if (p.tokens == 0) return cudaSuccess;
    if (const Launcher tiles = find_tiles(p.format)) return tiles(p, stream);
    const std::int64_t elements = static_cast<std::int64_t>(p.tokens) * p.kv_heads * p.format.head_dim;
    const auto blocks = static_cast<unsigned>((elements + kThreads - 1) / kThreads);
    return launch(gather_kernel, dim3(blocks, 2), dim3(kThreads), 0, stream, p);
}

}  // namespace quarot
