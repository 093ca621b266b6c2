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

#include <type_traits>

#include "device/launch.cuh"
#include "kv_cache/kv_append.h"
#include "kv_cache/quantize_group.cuh"

namespace quarot {

constexpr int kRowsPerWarp = 4;
#ifndef QUAROT_APPEND_CTAS
#define QUAROT_APPEND_CTAS 1
#endif

// The block of a slot and head.
template <typename Params>
__device__ __forceinline__ auto slot_block(const Params& p, int slot, int head, int block_bytes) -> decltype(p.pool) {
    const unsigned block = static_cast<unsigned>(slot) / kBlockTokens, page = block / p.page_blocks;
    return p.pool + (static_cast<std::int64_t>(page * p.kv_heads + head) * p.page_blocks + block % p.page_blocks) *
                        block_bytes;
}

// The slot of a token, -1 for "do not write" (also out of the pool, which holds less than 2^31 tokens).
template <typename Params>
__device__ __forceinline__ int load_slot(const Params& p, int token) {
    const std::int64_t slot = token < p.tokens ? p.slots[token] : -1;
    return slot >= 0 && slot < static_cast<std::int64_t>(p.num_pages) * p.page_blocks * kBlockTokens
               ? static_cast<int>(slot)
               : -1;
}

// A raw 16-bit word; float32 models store saturated fp16. NaN is canonical, as PyTorch's.
__device__ __forceinline__ unsigned raw_word(float x, bool bf16) {
    if (x != x) return bf16 ? 0x7fc0u : 0x7e00u;
    if (bf16) return __bfloat16_as_ushort(__float2bfloat16_rn(x));
    return __half_as_ushort(__float2half_rn(fminf(fmaxf(x, -65504.0f), 65504.0f)));
}

__device__ __forceinline__ float2 widen(std::uint32_t x, DType dtype) {
    if (dtype == DType::kFloat16) return __half22float2(*reinterpret_cast<const __half2*>(&x));
    return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)};
}

// x[Run i + e] = element first + stride i + e of a row, i < Count: one load a run (two in float32), all before any use.
template <int Count, int Run>
__device__ __forceinline__ void load_runs(const void* row, DType dtype, int first, int stride, float (&x)[Count * Run]) {
    if (dtype == DType::kFloat32) {
        using Part = std::conditional_t<Run == 2, float2, float4>;
        constexpr int kPart = sizeof(Part) / 4;
#pragma unroll
        for (int i = 0; i < Count * Run; i += kPart)
            *reinterpret_cast<Part*>(x + i) = *reinterpret_cast<const Part*>(static_cast<const float*>(row) + first +
                                                                            stride * (i / Run) + i % Run);
        return;
    }
    constexpr int kWords = Run / 2;
    using Part = std::conditional_t<Run == 2, std::uint32_t, std::conditional_t<Run == 4, uint2, uint4>>;
    alignas(16) std::uint32_t raw[Count * kWords];
#pragma unroll
    for (int i = 0; i < Count; ++i)
        *reinterpret_cast<Part*>(raw + i * kWords) =
            *reinterpret_cast<const Part*>(static_cast<const std::uint16_t*>(row) + first + stride * i);
#pragma unroll
    for (int i = 0; i < Count * kWords; ++i) {
        const float2 two = widen(raw[i], dtype);
        x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
}

// A lane's share of a row in the final distribution: x[2 I + e] = dim 16 I + 2 place + e.
template <int D>
__device__ __forceinline__ void load_row(const void* row, DType dtype, int place, float (&x)[D / 8]) {
    load_runs<D / 16, 2>(row, dtype, 2 * place, 16, x);
}

// D/8 consecutive dims of a row: x[j] = dim D/8 * place + j.
template <int D>
__device__ __forceinline__ void load_run(const void* row, DType dtype, int place, float (&x)[D / 8]) {
    load_runs<D / 64, 8>(row, dtype, D / 8 * place, 8, x);
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
    // Each step swaps register bit `bit` with a lane bit. The difference comes out negated in the upper lane; the three
    // signs stay with their registers (later steps pair registers of equal sign) and are undone with the final scale.
    float signs[8];
    signs[0] = static_cast<float>(1.0 / sqrt(static_cast<double>(D)));
    // D = 64 swaps bit 1 twice: what step 0 negated then is all of lane bit 2.
    if (D == 64 && (lane & 5) == 5) signs[0] = -signs[0];
#pragma unroll
    for (int step = 0; step < 3; ++step) {
        const int bit = D == 64 && step == 2 ? 2 : 2 << step;  // stands for dim bit step + 1
        const bool upper = lane >> step & 1;
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
            if (j & bit) continue;
            const float kept = upper ? x[j + bit] : x[j];
            const float received = __shfl_xor_sync(0xffffffffu, upper ? x[j] : x[j + bit], 1 << step);
            x[j] = kept + received, x[j + bit] = kept - received;
        }
        const float sign = upper ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < 1 << step; ++i) signs[i + (1 << step)] = signs[i] * sign;
    }
    float y[kPer];
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int j = rotated_register<D>(i, e);
            y[2 * i + e] = x[j] * signs[D == 64 ? (j >> 1 & 1) * 4 + (j >> 2 & 1) * 2 : j >> 1 & 7];
        }
    }
#pragma unroll
    for (int j = 0; j < kPer; ++j) x[j] = y[j];
}

// Quantises a row in the final distribution and stores it at `slot` (negative: nowhere). All lanes of the warp call it.
// Params: pool, kv_heads, page_blocks, key_clip, value_clip.
template <int D, int Bits, int Groups, typename Params>
__device__ __forceinline__ void quantize_and_store_row(const Params& p, bool key, int slot, int head,
                                                       const float (&x)[D / 8], int lane) {
    constexpr int kMmas = D / 16;
    constexpr int kPairs = 8 / Bits;                         // mmas whose codes share a word
    constexpr int kHalves = kMmas / kPairs;                  // 16-bit halves of a lane
    constexpr int kChunk = D < 512 / Bits ? D : 512 / Bits;  // dims of a chunk; D is a multiple
    constexpr int kPieceBytes = kChunk * Bits / 32, kWords = kPieceBytes / 4;
    static_assert(kHalves >= 2 && kHalves % 2 == 0 && D % kChunk == 0);
    const int place = lane % 8, row = lane / 8;
    const Side side = key ? Side::kKey : Side::kValue;
    constexpr KVFormat kFormat{D, Bits, Bits, D / Groups, D / Groups};  // known here: no division by a group at run time
    std::uint8_t* block = slot_block(p, slot < 0 ? 0 : slot, head, kFormat.block_bytes());
    const int offset = slot < 0 ? 0 : slot % kBlockTokens;
    // Low 16 bits: the codes. A code is the low bits of (2^23 + 2^22 + code) as a float; what the rest of those bits adds
    // up to is taken off beforehand.
    std::uint32_t halves[kHalves];
    std::uint32_t bias = 0;
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) bias += kRoundingBits << (Bits * (i / 2) + 8 * (i % 2));
#pragma unroll
    for (int i = 0; i < kHalves; ++i) halves[i] = 0u - bias;
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
        const GroupQuantizer<Bits> quantizer(low, high, key ? p.key_clip : p.value_clip);
#pragma unroll
        for (int j = 0; j < kPer; ++j) {
            const int mma = kPer * group + j;
#pragma unroll
            for (int e = 0; e < 2; ++e)
                halves[mma / kPairs] += quantizer.rounded_bits(x[2 * mma + e]) << (Bits * (mma % kPairs) + 8 * e);
        }
        if (place == 0 && slot >= 0)
            reinterpret_cast<__half2*>(block + kFormat.param_offset(side))[kBlockTokens * group + offset] =
                quantizer.params();
    }

    // Partner: the lane with the other half of the same words.
    const int distance = key ? 1 : 8;
    const int half = key ? place % 2 : offset % 2;
    const int other = __shfl_xor_sync(0xffffffffu, slot, distance);
    const bool paired = slot >= 0 && (key || (row % 2 == half && other == (slot ^ 1)));
    const int piece = key ? 4 * (offset % 8) + place / 2 : 4 * place + offset % 8 / 2;
    std::uint8_t* target = block + kFormat.code_offset(side) + (32 * (offset / 8) + piece) * kPieceBytes;
    const auto word_address = [&](int word) {
        return target + word / kWords * (kChunk * 2 * Bits) + 4 * (word % kWords);
    };
    const bool upper = key ? half : row % 2;  // completes the upper half of the words
    constexpr int kKeep = kHalves / 2;
#pragma unroll
    for (int i = 0; i < kKeep; ++i) {
        const std::uint32_t sent = upper ? halves[i] : halves[kKeep + i];
        const std::uint32_t received = __shfl_xor_sync(0xffffffffu, sent, distance);
        if (paired) {
            const std::uint32_t mine = upper ? halves[kKeep + i] : halves[i];
            *reinterpret_cast<std::uint32_t*>(word_address(upper ? kKeep + i : i)) =
                upper ? received | mine << 16 : mine | received << 16;
        }
    }
    if (!paired && slot >= 0) {
#pragma unroll
        for (int word = 0; word < kHalves; ++word)
            *reinterpret_cast<std::uint16_t*>(word_address(word) + 2 * half) = static_cast<std::uint16_t>(halves[word]);
    }
}

// Grid: x = groups of 16 tokens, y = kv head, z = 0 keys, 1 values.
template <int D, int Bits, int Groups, int Warps>
__global__ void __launch_bounds__(32 * Warps, QUAROT_APPEND_CTAS) append_rows_kernel(const __grid_constant__ AppendParams p) {
    pdl_wait();
    const int lane = threadIdx.x % 32, place = lane % 8, head = blockIdx.y;
    const int token = (blockIdx.x * Warps + threadIdx.x / 32) * kRowsPerWarp + lane / 8;
    const bool key = blockIdx.z == 0, rotate = key && p.rotate_order != 0;
    if (token - lane / 8 >= p.tokens) return;
    const int slot = load_slot(p, token);
    float x[D / 8];
    {
        const int element = p.dtype == DType::kFloat32 ? 4 : 2, row = min(token, p.tokens - 1);
        const std::int64_t start = key ? row * p.key_token_stride + head * p.key_head_stride
                                       : row * p.value_token_stride + head * p.value_head_stride;
        const void* source = static_cast<const std::uint8_t*>(key ? p.key : p.value) + start * element;
        if (rotate) {
            load_run<D>(source, p.dtype, place, x);
            rotate_row_registers<D>(x, place);
        } else {
            load_row<D>(source, p.dtype, place, x);
        }
    }
    quantize_and_store_row<D, Bits, Groups>(p, key, slot, head, x, lane);
    // No early trigger of the next kernel: decode attention fetches old pages before it waits for us.
}

}  // namespace quarot
