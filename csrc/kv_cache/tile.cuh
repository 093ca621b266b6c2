// A tile is 8 consecutive tokens of one head, half a block in the page layout: a warp's share in the fast kernels.
//
// Keys: 4 lanes a token; lane i of them holds dims 16 I + 4 i + j, j = 2 h + e.
// Values: lane (p, t) = (lane / 4, lane % 4) holds dims 16 I + 2 p + e of tokens 2 t and 2 t + 1 (h).
// By quarot/ops/kv_layout.py these are whole pieces: the code of (I, h, e) is at bit 16 h + 8 e + Bits (I % kPairs) of word
// I / kPairs.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kv_cache/format.h"

namespace quarot {

constexpr int kTileTokens = 8;

template <int D, int Bits, int Groups>
struct Tile {
    static constexpr KVFormat kFormat{D, Bits, Bits, D / Groups, D / Groups};
    static constexpr int kBlockBytes = kFormat.block_bytes(), kValueCodes = kFormat.code_offset(Side::kValue);
    static constexpr int kKeyParams = kFormat.param_offset(Side::kKey);
    static constexpr int kValueParams = kFormat.param_offset(Side::kValue);
    static constexpr int kMmas = D / 16, kPairs = 8 / Bits, kWords = kMmas / kPairs;
    static constexpr int kPer = kMmas / Groups;  // mmas of a group
    static constexpr int kChunk = D < 512 / Bits ? D : 512 / Bits;
    static constexpr int kChunkBytes = 2 * kChunk * Bits;    // of 16 tokens
    static constexpr int kPieceWords = kChunk * Bits / 128;  // of a lane and chunk, one vector load or store
    using Vector = std::conditional_t<kPieceWords == 4, uint4, uint2>;
    static_assert(kPer % kPairs == 0 && (kPieceWords == 2 || kPieceWords == 4));

    // First piece of a token's lane; the pieces of further chunks follow kChunkBytes apart.
    template <typename Byte>
    __device__ __forceinline__ static Byte* key_piece(Byte* block, int token, int place) {
        return block + (32 * (token / 8) + 4 * (token % 8) + place) * (4 * kPieceWords);
    }

    // The same for values; the token's codes are in half token % 2 of every word.
    template <typename Byte>
    __device__ __forceinline__ static Byte* value_piece(Byte* block, int token, int place) {
        return block + kValueCodes + (32 * (token / 8) + 4 * place + token % 8 / 2) * (4 * kPieceWords);
    }
};

}  // namespace quarot
