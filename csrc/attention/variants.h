// The formats that have a tensor-core kernel. Each variants_*.cu instantiates some; everything else is generic.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/decode_params.h"
#include "kv_cache/format.h"

namespace quarot {

using DecodeKernel = void (*)(DecodeParams);

struct DecodeVariant {
    KVFormat format;
    bool bf16;  // raw bf16 pool
    DecodeKernel kernel;
    DecodeKernel cluster_kernel;  // or null
    int stage_bytes, stage_blocks;
};

struct DecodeVariants {
    const DecodeVariant* begin;
    int count;
};

DecodeVariants head128_int4_variants();
DecodeVariants head128_other_variants();
DecodeVariants head64_variants();
DecodeVariants other_head_variants();

cudaError_t launch_generic_decode(const KVFormat& format, int grid, const DecodeParams& params, cudaStream_t stream);

}  // namespace quarot
