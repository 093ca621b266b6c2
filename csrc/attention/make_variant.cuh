// One row of a variants table: instantiates the kernel of a format.
#pragma once

#include "attention/decode_cluster.cuh"
#include "attention/decode_kernel.cuh"
#include "attention/variants.h"

namespace quarot {

// Blocks of a stage: 64 tokens, or fewer where that would make a stage larger than 9 KB.
constexpr int stage_blocks(int block_bytes) { return block_bytes <= 2560 ? 4 : block_bytes <= 4608 ? 2 : 1; }

template <int D, int KeyBits, int ValueBits, int KeyGroup = D, int ValueGroup = D, bool Bf16 = false>
DecodeVariant make_variant() {
    constexpr KVFormat kFormat{D, KeyBits, ValueBits, KeyGroup, ValueGroup};
    using Config = DecodeConfig<D, KeyBits, ValueBits, KeyGroup, ValueGroup, stage_blocks(kFormat.block_bytes()), Bf16>;
    DecodeKernel cluster_kernel = nullptr;
    if constexpr (KeyBits == ValueBits && (KeyBits == 4 || KeyBits == 8) && (D == 64 || D == 128))
        cluster_kernel = cluster_decode_kernel<Config>;
    return {kFormat, Bf16, decode_kernel<Config>, cluster_kernel, Config::kStageBytes, Config::kBlocks};
}

}  // namespace quarot
