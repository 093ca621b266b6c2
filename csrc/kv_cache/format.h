// Sizes and offsets of a block of 16 tokens of one kv head; the byte order is specified in quarot/ops/kv_layout.py.
#pragma once

#ifdef __CUDACC__
#define QUAROT_HOST_DEVICE __host__ __device__
#else
#define QUAROT_HOST_DEVICE
#endif

namespace quarot {

constexpr int kBlockTokens = 16;

enum class Side : int { kKey = 0, kValue = 1 };

struct KVFormat {
    int head_dim;
    int key_bits, value_bits;    // 2, 3, 4, 8, or 16 = raw 16-bit floats
    int key_group, value_group;  // dims that share a (scale, offset); divides head_dim, a multiple of 16

    QUAROT_HOST_DEVICE constexpr int bits(Side side) const { return side == Side::kKey ? key_bits : value_bits; }
    QUAROT_HOST_DEVICE constexpr int group(Side side) const { return side == Side::kKey ? key_group : value_group; }
    QUAROT_HOST_DEVICE constexpr int groups(Side side) const {
        return bits(side) == 16 ? 0 : head_dim / group(side);
    }
    QUAROT_HOST_DEVICE constexpr int code_bytes(Side side) const { return 2 * head_dim * bits(side); }
    QUAROT_HOST_DEVICE constexpr int code_offset(Side side) const {
        return side == Side::kKey ? 0 : code_bytes(Side::kKey);
    }
    QUAROT_HOST_DEVICE constexpr int param_offset(Side side) const {
        return code_bytes(Side::kKey) + code_bytes(Side::kValue) +
               (side == Side::kKey ? 0 : 4 * kBlockTokens * groups(Side::kKey));
    }
    QUAROT_HOST_DEVICE constexpr int block_bytes() const {
        return param_offset(Side::kValue) + 4 * kBlockTokens * groups(Side::kValue);
    }
};

}  // namespace quarot
