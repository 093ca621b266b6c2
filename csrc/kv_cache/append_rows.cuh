// The tuned append kernel: 8 lanes a row, 4 rows (consecutive tokens of one head) a warp, everything in registers.
//
// Lane i of a row ends up with dims 16 I + 2 i + e, I = 0 .. D/16-1, e = 0, 1: by the layout these are exactly the codes of
// one 16-bit half of every word of a piece, for keys (piece i / 2, half i % 2) and for values (piece i, half token % 2).
// Two lanes (keys: neighbours; values: the same lane of the next token) then swap halves and each stores whole words.
//
// R3: a lane starts with D/8 consecutive dims (butterflies of distance 1 .. D/16 in registers); the three butterflies
// across lanes exchange half of the registers instead of all, which turns the distribution into the one above.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/launch.cuh"
#include "kv_cache/kv_append.h"
#include "kv_cache/quantize_group.cuh"

namespace quarot {

constexpr int kRowsPerWarp = 4;

// The block of a slot and head.
__device__ __forceinline__ std::uint8_t* slot_block(const AppendParams& p, std::int64_t slot, int head) {
    const int page_size = p.page_blocks * kBlockTokens;
    const std::int64_t page = slot / page_size;
    const int block = static_cast<int>(slot % page_size) / kBlockTokens;
    return p.pool + ((page * p.kv_heads + head) * p.page_blocks + block) * p.format.block_bytes();
}

// A raw 16-bit word; float32 models store saturated fp16.
__device__ __forceinline__ unsigned raw_word(float x, bool bf16) {
    if (bf16) return __bfloat16_as_ushort(__float2bfloat16_rn(x));
    return __half_as_ushort(__float2half_rn(x != x ? x : fminf(fmaxf(x, -65504.0f), 65504.0f)));
}

__device__ __forceinline__ float2 load_two(const void* row, DType dtype, int dim) {
    if (dtype == DType::kFloat32) return *reinterpret_cast<const float2*>(static_cast<const float*>(row) + dim);
    const std::uint32_t x = *reinterpret_cast<const std::uint32_t*>(static_cast<const std::uint16_t*>(row) + dim);
    if (dtype == DType::kFloat16) return __half22float2(*reinterpret_cast<const __half2*>(&x));
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}

// Register that holds dims 16 I + 2 lane + e after the exchanges: register bits 1, 2, 3 stand for dim bits L, L+1, L+2
// (L = log2(D/8)); at D = 64 bit 1 was swapped twice, at D = 256 bit 4 still is dim bit 4.
template <int D>
__device__ constexpr int rotated_register(int i, int e) {
    if constexpr (D == 64) return (i & 1) << 2 | (i & 2) | e;
    if constexpr (D == 128) return i << 1 | e;
    return (i & 1) << 4 | (i & 14) | e;
}

// In: x[j] = dim D/8 * lane + j of the row; out: x[2 I + e] = dim 16 I + 2 lane + e of the rotated row.
template <int D>
__device__ __forceinline__ void rotate_row_registers(float (&x)[D / 8], int lane) {
    constexpr int kPer = D / 8;
#pragma unroll
    for (int distance = 1; distance < kPer; distance *= 2) {
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
            if (j & distance) continue;
            const float a = x[j], b = x[j + distance];
            x[j] = a + b, x[j + distance] = a - b;
        }
    }
#pragma unroll
    for (int step = 0; step < 3; ++step) {
        // The register bit that stands for dim bit step + 1.
        const int bit = D == 64 && step == 2 ? 2 : 2 << step;
        const bool upper = lane >> step & 1;
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
            if (j & bit) continue;
            const float kept = upper ? x[j + bit] : x[j];
            const float received = __shfl_xor_sync(0xffffffffu, upper ? x[j] : x[j + bit], 1 << step);
            const float first = upper ? received : kept, second = upper ? kept : received;
            x[j] = first + second, x[j + bit] = first - second;
        }
    }
    float y[kPer];
    const float scale = static_cast<float>(1.0 / sqrt(static_cast<double>(D)));
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) y[2 * i + e] = x[rotated_register<D>(i, e)] * scale;
#pragma unroll
    for (int j = 0; j < kPer; ++j) x[j] = y[j];
}

// Grid: x = groups of rows (head fastest), y = 0 keys, 1 values.
template <int D, int Bits, int Groups, int Warps>
__global__ void __launch_bounds__(32 * Warps) append_rows_kernel(const __grid_constant__ AppendParams p) {
    constexpr int kMmas = D / 16;
    constexpr int kPairs = 8 / Bits;                  // mmas whose codes share a word
    constexpr int kHalves = kMmas / kPairs;           // 16-bit halves of a lane
    static_assert(kHalves >= 2 && 512 / Bits >= 64);
    constexpr int kChunk = D < 512 / Bits ? D : 512 / Bits;  // dims of a chunk; D is a multiple
    constexpr int kPieceBytes = kChunk * Bits / 32;
    constexpr int kWords = kPieceBytes / 4;           // of a piece
    pdl_wait();
    const int lane = threadIdx.x % 32, place = lane % 8, row = lane / 8;
    const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * Warps + threadIdx.x / 32;
    const int head = static_cast<int>(warp % p.kv_heads);
    const std::int64_t token = warp / p.kv_heads * kRowsPerWarp + row;
    const bool key = blockIdx.y == 0;
    const Side side = key ? Side::kKey : Side::kValue;
    const std::int64_t slots_end = static_cast<std::int64_t>(p.num_pages) * p.page_blocks * kBlockTokens;
    std::int64_t slot = token < p.tokens ? p.slots[token] : -1;
    if (slot >= slots_end) slot = -1;

    float x[2 * kMmas];
    {
        const int element = p.dtype == DType::kFloat32 ? 4 : 2;
        const std::int64_t start = key ? token * p.key_token_stride + head * p.key_head_stride
                                       : token * p.value_token_stride + head * p.value_head_stride;
        const void* source = static_cast<const std::uint8_t*>(key ? p.key : p.value) + start * element;
        const bool rotate = key && p.rotate_order != 0;
        // Rotated rows are read D/8 consecutive dims a lane, others already in the final distribution.
#pragma unroll
        for (int i = 0; i < kMmas; ++i) {
            const int dim = rotate ? D / 8 * place + 2 * i : 16 * i + 2 * place;
            const float2 two = token < p.tokens ? load_two(source, p.dtype, dim) : float2{0.0f, 0.0f};
            x[2 * i] = two.x, x[2 * i + 1] = two.y;
        }
        if (rotate) rotate_row_registers<D>(x, place);
    }

    std::uint8_t* block = slot_block(p, slot < 0 ? 0 : slot, head);
    const int offset = slot < 0 ? 0 : static_cast<int>(slot % kBlockTokens);
    std::uint32_t halves[kHalves];  // low 16 bits
#pragma unroll
    for (int i = 0; i < kHalves; ++i) halves[i] = 0;
#pragma unroll
    for (int group = 0; group < Groups; ++group) {
        constexpr int kPer = kMmas / Groups;
        float low = x[2 * kPer * group], high = low;
#pragma unroll
        for (int j = 1; j < 2 * kPer; ++j) {
            low = min_nan(low, x[2 * kPer * group + j]), high = max_nan(high, x[2 * kPer * group + j]);
        }
#pragma unroll
        for (int distance = 1; distance < 8; distance *= 2) {
            low = min_nan(low, __shfl_xor_sync(0xffffffffu, low, distance));
            high = max_nan(high, __shfl_xor_sync(0xffffffffu, high, distance));
        }
        const GroupQuantizer quantizer(low, high, key ? p.key_clip : p.value_clip, Bits);
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
            const int mma = kPer * group + j;
#pragma unroll
            for (int e = 0; e < 2; ++e)
                halves[mma / kPairs] |= quantizer.code(x[2 * mma + e]) << (Bits * (mma % kPairs) + 8 * e);
        }
        if (place == 0 && slot >= 0)
            reinterpret_cast<__half2*>(block + p.format.param_offset(side))[kBlockTokens * group + offset] =
                quantizer.params();
    }

    // Partner: the lane with the other half of the same words.
    const int distance = key ? 1 : 8;
    const int half = key ? place % 2 : offset % 2;
    const std::int64_t other = __shfl_xor_sync(0xffffffffu, slot, distance);
    const bool paired = slot >= 0 && (key || (row % 2 == half && other == (slot ^ 1)));
    const int piece = key ? 4 * (offset % 8) + place / 2 : 4 * place + offset % 8 / 2;
    std::uint8_t* target = block + p.format.code_offset(side) + (32 * (offset / 8) + piece) * kPieceBytes;
    constexpr int kKeep = kHalves / 2;
#pragma unroll
    for (int i = 0; i < kKeep; ++i) {
        // Half 0 completes words 0 .. kKeep-1, half 1 the rest.
        const bool upper = key ? half : row % 2;
        const std::uint32_t sent = upper ? halves[i] : halves[kKeep + i];
        const std::uint32_t received = __shfl_xor_sync(0xffffffffu, sent, distance);
        if (!paired) continue;
        const std::uint32_t mine = upper ? halves[kKeep + i] : halves[i];
        const int word = upper ? kKeep + i : i;
        const std::uint32_t value = upper ? received | mine << 16 : mine | received << 16;
        const int chunk = word / kWords;
        *reinterpret_cast<std::uint32_t*>(target + chunk * kChunk * 2 * Bits + 4 * (word % kWords)) = value;
    }
    if (!paired && slot >= 0) {
#pragma unroll
        for (int word = 0; word < kHalves; ++word)
            *reinterpret_cast<std::uint16_t*>(target + word / kWords * kChunk * 2 * Bits + 4 * (word % kWords) +
                                              2 * half) = static_cast<std::uint16_t>(halves[word]);
    }
    // The decode kernel may prefetch blocks before it waits for us (not these, but be strict): stores first.
    __threadfence();
    pdl_trigger();
}

}  // namespace quarot
