// Launcher of decode attention; the op is specified in quarot/ops/decode_attention.py.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/decode_params.h"
#include "kv_cache/format.h"

namespace quarot {

struct DecodeShape {
    KVFormat format;
    DType dtype;  // of the queries
    int batch, tokens, query_heads, kv_heads;
    int max_tokens;  // page table columns times page size: no sequence is longer
};

// How a call is launched. Depends on shapes only, never on lengths: a captured graph stays valid as sequences grow.
struct DecodePlan {
    int tiles, max_splits, cta_slots, grid;
    int warps, ring_stages;  // of a CTA; 0 stages: the generic kernel
    int mixed_percent;
    int items;               // most work items there can be: partial [items, 8, D], max_sum [items, 8, 2], counters [items]
    int cluster;             // CTAs of a cluster (decode_cluster.cuh); 0: the other kernels
};

// Tuning overrides for benchmarks and tests; 0 = the built-in choice.
struct DecodeTuning {
    int warps, ring_stages, ctas_per_sm, max_splits;
    bool generic;
    int mixed_percent;  // of a CTA's even share: the smallest piece of a batch of mixed lengths
    int cluster;        // CTAs of a cluster; 1: no clusters
};

// Plan for the current device.
DecodePlan decode_plan(const DecodeShape& shape, const DecodeTuning& tuning);

// Launches as planned; what the plan decides is set in `params` here.
cudaError_t decode_attention(const DecodeShape& shape, const DecodePlan& plan, DecodeParams params,
                             cudaStream_t stream);

}  // namespace quarot
