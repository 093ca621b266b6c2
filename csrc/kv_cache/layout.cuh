// Byte order of a block on the device, for any head_dim and width: the formulas of quarot/ops/kv_layout.py.
// The hot kernels have it in their structure; these functions serve the generic ones.
#pragma once

#include <cstdint>

#include "kv_cache/format.h"

namespace quarot {

// Chunk of the low plane that holds `dim`: its size and first dim.
__device__ __forceinline__ void find_chunk(int head_dim, int width, int dim, int& size, int& base) {
    base = 0;
    size = 512 / width;
    for (;;) {
        while (size > head_dim - base) size /= 2;
        if (dim < base + size) return;
        base += size;
    }
}

// Bit address, within its plane, of the lowest bit of (token, dim). `chunk_width`: width of the low plane (2 for both
// planes of 3 bits).
__device__ __forceinline__ int bit_address(Side side, int head_dim, int width, int chunk_width, int token, int dim) {
    int size, base;
    find_chunk(head_dim, chunk_width, dim, size, base);
    const int start = kBlockTokens * base * width;
    dim -= base;
    const int piece_bits = size * width / 4;
    if (piece_bits < 16) return start + token * size * width + dim * width;
    const int mma = dim / 16, low = dim % 2;
    const int lane = side == Side::kKey ? 4 * (token % 8) + dim % 16 / 4 : 4 * (dim % 16 / 2) + token % 8 / 2;
    const int half = side == Side::kKey ? dim % 4 / 2 : token % 2;
    const int half_bits = piece_bits >= 32 ? 16 : 8;
    int bit;
    if (width == 16) {
        bit = 32 * (2 * mma + low) + 16 * half;
    } else if (width == 1) {
        const int word = mma / 4;
        bit = 32 * (word / 2) + half_bits * half + 8 * (word % 2) + 2 * (mma % 4) + low;
    } else {
        const int pairs = half_bits / 2 / width;
        bit = 2 * half_bits * (mma / pairs) + half_bits * half + width * (mma % pairs) + half_bits / 2 * low;
    }
    return start + (32 * (token / 8) + lane) * piece_bits + bit;
}

// Code of (token, dim); 16 bits: the raw word. `codes` points at the side's codes of the block.
__device__ __forceinline__ unsigned read_code(const std::uint8_t* codes, Side side, int head_dim, int bits, int token,
                                              int dim) {
    const int width = bits == 3 ? 2 : bits;
    const int address = bit_address(side, head_dim, width, width, token, dim);
    if (bits == 16) return *reinterpret_cast<const std::uint16_t*>(codes + address / 8);
    unsigned code = codes[address / 8] >> (address % 8) & ((1u << width) - 1);
    if (bits == 3) {
        const int high = bit_address(side, head_dim, 1, 2, token, dim);
        code |= (codes[4 * head_dim + high / 8] >> (high % 8) & 1u) << 2;
    }
    return code;
}

// One plane of one token: `lanes` lanes share the work, `code(dim)` gives the plane's bits of a dim. No read-modify-write:
// every token owns whole bytes.
template <typename F>
__device__ __forceinline__ void store_plane(std::uint8_t* plane, Side side, int head_dim, int width, int chunk_width,
                                            int token, int lane, int lanes, F&& code) {
    for (int base = 0, size = 512 / chunk_width; base < head_dim; base += size) {
        while (size > head_dim - base) size /= 2;
        std::uint8_t* chunk = plane + 2 * base * width;
        const int piece = size * width / 32;  // bytes; 0 and 1 mean plain rows
        if (piece < 2) {
            const int per_byte = 8 / width;
            for (int i = lane; i < size / per_byte; i += lanes) {
                unsigned value = 0;
                for (int j = 0; j < per_byte; ++j) value |= code(base + i * per_byte + j) << (j * width);
                chunk[token * (size / per_byte) + i] = static_cast<std::uint8_t>(value);
            }
            continue;
        }
        const int half_bits = piece >= 4 ? 16 : 8;
        const int words = piece >= 4 ? piece / 4 : 1;
        for (int item = lane; item < 8 * words; item += lanes) {
            const int word = item / 8, place = item % 8;  // dims 16 i + 2 place + e
            const int piece_lane = side == Side::kKey ? 4 * (token % 8) + place / 2 : 4 * place + token % 8 / 2;
            const int half = side == Side::kKey ? place % 2 : token % 2;
            unsigned value = 0;
            if (width == 16) {
                value = code(base + 16 * (word / 2) + 2 * place + word % 2);
            } else if (width == 1) {
                for (int i = 0; i < half_bits / 2; ++i) {
                    const int dim = base + 16 * (8 * word + i) + 2 * place;
                    value |= (code(dim) | code(dim + 1) << 1) << (8 * (i / 4) + 2 * (i % 4));
                }
            } else {
                const int pairs = half_bits / 2 / width;
                for (int i = 0; i < pairs; ++i) {
                    const int dim = base + 16 * (pairs * word + i) + 2 * place;
                    value |= (code(dim) | code(dim + 1) << (half_bits / 2)) << (width * i);
                }
            }
            std::uint8_t* target = chunk + (32 * (token / 8) + piece_lane) * piece + 4 * word + half_bits / 8 * half;
            if (half_bits == 16) {
                *reinterpret_cast<std::uint16_t*>(target) = static_cast<std::uint16_t>(value);
            } else {
                *target = static_cast<std::uint8_t>(value);
            }
        }
    }
}

}  // namespace quarot
