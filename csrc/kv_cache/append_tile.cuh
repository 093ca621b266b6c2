// The prefill append kernel: tiles of 8 tokens (tile.cuh), every lane quantises and stores whole pieces. NOTES.md has the
// instruction counts.
//
// R3's butterflies run inside lanes: on runs of D/4 consecutive dims first, then, after one exchange through shared
// memory, on the tile's distribution.
#pragma once

#include "kv_cache/append_rows.cuh"
#include "kv_cache/tile.cuh"

namespace quarot {

template <int D, int Bits, int Groups>
struct AppendTile : Tile<D, Bits, Groups> {
    using Base = Tile<D, Bits, Groups>;
    using Base::kBlockBytes, Base::kMmas, Base::kPairs, Base::kWords, Base::kPer, Base::kChunkBytes, Base::kPieceWords;
    static constexpr int kRun = D / 4, kStride = kRun + 4;  // of the exchange, floats: + 4 keeps banks apart
    static constexpr int kExchange = kTileTokens * 4 * kStride;

    // Four rounded codes to the bytes of a word.
    __device__ __forceinline__ static std::uint32_t bytes(unsigned a, unsigned b, unsigned c, unsigned d) {
        return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
    }

    // The words of a lane to its piece of every chunk.
    __device__ __forceinline__ static void store_pieces(std::uint8_t* piece, const std::uint32_t (&words)[kWords]) {
#pragma unroll
        for (int i = 0; i < kWords; i += kPieceWords)
            *reinterpret_cast<typename Base::Vector*>(piece + i / kPieceWords * kChunkBytes) =
                *reinterpret_cast<const typename Base::Vector*>(words + i);
    }

    // The params of group 0 of a side; those of the 16 tokens follow each other.
    __device__ __forceinline__ static __half2* params(std::uint8_t* block, Side side) {
        return reinterpret_cast<__half2*>(block + (side == Side::kKey ? Base::kKeyParams : Base::kValueParams));
    }

    // x[k] = dim kRun * place + k -> x[4 I + j] = dim 16 I + 4 place + j of the rotated row, all butterflies but the last.
    __device__ __forceinline__ static void rotate_but_last(float (&x)[D / 4], float* exchange, int lane) {
#pragma unroll
        for (int distance = 1; distance < kRun; distance *= 2) butterflies(x, distance);
        float* row = exchange + lane / 4 * (4 * kStride);
#pragma unroll
        for (int k = 0; k < kRun; k += 4)
            *reinterpret_cast<float4*>(row + lane % 4 * kStride + k) = *reinterpret_cast<const float4*>(x + k);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kMmas; ++i)
            *reinterpret_cast<float4*>(x + 4 * i) =
                *reinterpret_cast<const float4*>(row + 16 * i / kRun * kStride + 16 * i % kRun + 4 * (lane % 4));
        butterflies(x, D / 16);  // dims D/4 apart
    }

    __device__ __forceinline__ static void butterflies(float (&x)[D / 4], int distance) {
#pragma unroll
        for (int k = 0; k < D / 4; ++k) {
            if (k & distance) continue;
            const float a = x[k], b = x[k + distance];
            x[k] = a + b, x[k + distance] = a - b;
        }
    }

    __device__ __forceinline__ static void keys(const AppendParams& p, const void* row, int slot, int head, int lane,
                                                float* exchange) {
        const int place = lane % 4;
        float x[D / 4], low[Groups], high[Groups];
        const bool rotate = p.rotate_order != 0;
        if (rotate) {
            load_runs<D / 32, 8>(row, p.dtype, kRun * place, 8, x);
            rotate_but_last(x, exchange, lane);
            const float scale = static_cast<float>(1.0 / sqrt(static_cast<double>(D)));
            if constexpr (Groups == 1) {
                // The larger of a + b and a - b is a + |b|: half of the comparisons become additions, on another pipe.
#pragma unroll
                for (int k = 0; k < D / 8; ++k) {
                    const float a = x[k], b = x[k + D / 8], least = a - fabsf(b), most = a + fabsf(b);
                    low[0] = k ? min_nan(low[0], least) : least, high[0] = k ? max_nan(high[0], most) : most;
                }
                low[0] *= scale, high[0] *= scale;
            }
            butterflies(x, D / 8);
#pragma unroll
            for (int k = 0; k < D / 4; ++k) x[k] *= scale;
        } else {
            load_runs<kMmas, 4>(row, p.dtype, 4 * place, 16, x);
        }
        if (Groups > 1 || !rotate) {
#pragma unroll
            for (int group = 0; group < Groups; ++group) {
                low[group] = high[group] = x[4 * kPer * group];
#pragma unroll
                for (int k = 1; k < 4 * kPer; ++k) {
                    low[group] = min_nan(low[group], x[4 * kPer * group + k]);
                    high[group] = max_nan(high[group], x[4 * kPer * group + k]);
                }
            }
        }
        std::uint8_t* block = slot_block(p, slot < 0 ? 0 : slot, head, kBlockBytes);
        const int offset = slot < 0 ? 0 : slot % kBlockTokens;
        alignas(16) std::uint32_t words[kWords];
#pragma unroll
        for (int group = 0; group < Groups; ++group) {
#pragma unroll
            for (int distance = 1; distance < 4; distance *= 2) {
                low[group] = min_nan(low[group], __shfl_xor_sync(0xffffffffu, low[group], distance));
                high[group] = max_nan(high[group], __shfl_xor_sync(0xffffffffu, high[group], distance));
            }
            const GroupQuantizer<Bits> quantizer(low[group], high[group], p.key_clip);
            const auto four = [&](int mma) {
                const float* y = x + 4 * mma;
                return bytes(quantizer.rounded_bits(y[0]), quantizer.rounded_bits(y[1]), quantizer.rounded_bits(y[2]),
                             quantizer.rounded_bits(y[3]));
            };
            pack_group(words, group, four);
            if (place == 0 && slot >= 0)
                params(block, Side::kKey)[kBlockTokens * group + offset] = quantizer.params();
        }
        if (slot >= 0) store_pieces(Base::key_piece(block, offset, place), words);
    }

    // Words of a group from `four(mma)`, the codes of a lane in the bytes of a word.
    template <typename F>
    __device__ __forceinline__ static void pack_group(std::uint32_t (&words)[kWords], int group, F&& four) {
#pragma unroll
        for (int i = 0; i < kPer / kPairs; ++i) {
            const int word = group * (kPer / kPairs) + i;
            words[word] = four(word * kPairs);
#pragma unroll
            for (int k = 1; k < kPairs; ++k) words[word] += four(word * kPairs + k) << (Bits * k);
        }
    }

    __device__ __forceinline__ static void values(const AppendParams& p, const void* const (&rows)[2],
                                                  const int (&slots)[2], int head, int lane) {
        const int place = lane / 4;
        float x[2][D / 8];
#pragma unroll
        for (int h = 0; h < 2; ++h) load_row<D>(rows[h], p.dtype, place, x[h]);
        std::uint8_t* blocks[2];
        int offsets[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            blocks[h] = slot_block(p, slots[h] < 0 ? 0 : slots[h], head, kBlockBytes);
            offsets[h] = slots[h] < 0 ? 0 : slots[h] % kBlockTokens;
        }
        alignas(16) std::uint32_t words[kWords];
#pragma unroll
        for (int group = 0; group < Groups; ++group) {
            float low[2], high[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float* y = x[h] + 2 * kPer * group;
                low[h] = high[h] = y[0];
#pragma unroll
                for (int k = 1; k < 2 * kPer; ++k) low[h] = min_nan(low[h], y[k]), high[h] = max_nan(high[h], y[k]);
#pragma unroll
                for (int distance = 4; distance < 32; distance *= 2) {
                    low[h] = min_nan(low[h], __shfl_xor_sync(0xffffffffu, low[h], distance));
                    high[h] = max_nan(high[h], __shfl_xor_sync(0xffffffffu, high[h], distance));
                }
            }
            const GroupQuantizer<Bits> first(low[0], high[0], p.value_clip), second(low[1], high[1], p.value_clip);
            const auto four = [&](int mma) {
                return bytes(first.rounded_bits(x[0][2 * mma]), first.rounded_bits(x[0][2 * mma + 1]),
                             second.rounded_bits(x[1][2 * mma]), second.rounded_bits(x[1][2 * mma + 1]));
            };
            pack_group(words, group, four);
            if (place == 0 && slots[0] >= 0)
                params(blocks[0], Side::kValue)[kBlockTokens * group + offsets[0]] = first.params();
            if (place == 0 && slots[1] >= 0)
                params(blocks[1], Side::kValue)[kBlockTokens * group + offsets[1]] = second.params();
        }
        if (slots[0] >= 0 && slots[0] % 2 == 0 && slots[1] == slots[0] + 1) {
            store_pieces(Base::value_piece(blocks[0], offsets[0], place), words);
            return;
        }
        // The two tokens do not share words: 16-bit halves, no read-modify-write.
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (slots[h] < 0) continue;
            std::uint8_t* piece = Base::value_piece(blocks[h], offsets[h], place) + 2 * (offsets[h] % 2);
#pragma unroll
            for (int i = 0; i < kWords; ++i)
                *reinterpret_cast<std::uint16_t*>(piece + i / kPieceWords * kChunkBytes + 4 * (i % kPieceWords)) =
                    static_cast<std::uint16_t>(words[i] >> (16 * h));
        }
    }
};

// Grid: x = Warps * 8 tokens, y = kv head, z = 0 keys, 1 values.
template <int D, int Bits, int Groups, int Warps>
__global__ void __launch_bounds__(32 * Warps, 32 / Warps) append_tile_kernel(const __grid_constant__ AppendParams p) {
    using Append = AppendTile<D, Bits, Groups>;
    __shared__ __align__(16) float exchange[Warps][Append::kExchange];
    pdl_wait();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y;
    const int base = (blockIdx.x * Warps + warp) * kTileTokens;
    if (base >= p.tokens) return;
    const bool key = blockIdx.z == 0;
    const std::int64_t token_stride = key ? p.key_token_stride : p.value_token_stride;
    const std::int64_t head_start = head * (key ? p.key_head_stride : p.value_head_stride);
    const auto row = [&](int token) {
        return static_cast<const std::uint8_t*>(key ? p.key : p.value) +
               (min(token, p.tokens - 1) * token_stride + head_start) * (p.dtype == DType::kFloat32 ? 4 : 2);
    };
    if (key) {
        const int token = base + lane / 4;
        Append::keys(p, row(token), load_slot(p, token), head, lane, exchange[warp]);
    } else {
        const int token = base + 2 * (lane % 4);
        const void* const rows[2] = {row(token), row(token + 1)};
        const int slots[2] = {load_slot(p, token), load_slot(p, token + 1)};
        Append::values(p, rows, slots, head, lane);
    }
    // No early trigger of the next kernel: decode attention fetches old pages before it waits for us.
}

}  // namespace quarot
