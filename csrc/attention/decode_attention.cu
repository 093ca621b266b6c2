// Chooses the kernel and its shape, and launches it.
#include "attention/decode_attention.h"

#include <algorithm>

#include "attention/variants.h"
#include "device/launch.cuh"

namespace quarot {
namespace {

constexpr int kTileRows = 8;
constexpr int kMaxSplits = 32;        // pieces of a sequence: more make the merge longer than the reading
// Pieces of batches of mixed lengths, in percent of a CTA's even share: whole shares for large CTAs, as every further piece
// costs one its fixed time; halves where small ones share an SM and hide it (1 x 32k + 15 x 2k: 34.5 us with 50, 30.5 with
// 100; 64 uniform 1..8k: 100 and 109).
constexpr int kMixedPercentLarge = 100, kMixedPercentSmall = 50;

bool same_side(const KVFormat& a, const KVFormat& b, Side side) {
    return a.bits(side) == b.bits(side) && (a.bits(side) == 16 || a.group(side) == b.group(side));
}

const DecodeVariant* find_variant(const KVFormat& format, DType dtype) {
    const bool raw = format.key_bits == 16;
    for (const DecodeVariants& table :
         {head128_int4_variants(), head128_other_variants(), head64_variants(), other_head_variants()}) {
        for (int i = 0; i < table.count; ++i) {
            const DecodeVariant& v = table.begin[i];
            if (v.format.head_dim == format.head_dim && same_side(v.format, format, Side::kKey) &&
                same_side(v.format, format, Side::kValue) && (!raw || v.bf16 == (dtype == DType::kBFloat16)))
                return &v;
        }
    }
    return nullptr;
}

int device_attribute(cudaDeviceAttr attribute) {
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, attribute, device);
    return value;
}

// Rings, mbarriers and the warps' (max, sum); the rotated queries of a tile.
std::size_t shared_bytes(const DecodeVariant& v, int warps, int stages, bool rotate) {
    return static_cast<std::size_t>(warps) * (stages * (v.stage_bytes + 8) + kTileRows * 8) +
           (rotate ? kTileRows * v.format.head_dim * 2 : 0);
}

}  // namespace

DecodePlan decode_plan(const DecodeShape& s, const DecodeTuning& tuning) {
    const DecodeVariant* v = tuning.generic ? nullptr : find_variant(s.format, s.dtype);
    const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
    DecodePlan plan{};
    plan.tiles = (s.tokens * (s.query_heads / s.kv_heads) + kTileRows - 1) / kTileRows;
    const int columns = s.batch * s.kv_heads * plan.tiles;
    int per_sm = 3, stage_tokens = kBlockTokens;
    plan.mixed_percent = kMixedPercentSmall;
    if (v) {
        // One large CTA an SM while there are few items (batch 1 is bound by latency), small ones once items share SMs:
        // they even out the last wave.
        const bool many = columns > 2 * multiprocessors;
        plan.warps = tuning.warps ? tuning.warps : many ? 3 : 8;
        plan.ring_stages = tuning.ring_stages ? tuning.ring_stages : 2;
        per_sm = tuning.ctas_per_sm ? tuning.ctas_per_sm : many ? 4 : 1;
        stage_tokens = v->stage_blocks * kBlockTokens;
        if (per_sm == 1) plan.mixed_percent = kMixedPercentLarge;
        const std::size_t limit = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
        while (plan.warps > 1 && shared_bytes(*v, plan.warps, plan.ring_stages, true) + 1024 > limit) --plan.warps;
        const auto bytes = static_cast<int>(shared_bytes(*v, plan.warps, plan.ring_stages, true));
        int resident = 1;
        cudaFuncSetAttribute(v->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, v->kernel, 32 * plan.warps, bytes);
        per_sm = std::max(1, std::min(per_sm, resident));
    }
    plan.cta_slots = multiprocessors * per_sm;
    const int longest = (s.max_tokens + stage_tokens - 1) / stage_tokens;
    plan.max_splits = std::max(1, std::min(tuning.max_splits ? tuning.max_splits : kMaxSplits, longest));
    const std::int64_t most = static_cast<std::int64_t>(columns) * plan.max_splits;
    plan.grid = static_cast<int>(std::min<std::int64_t>(plan.cta_slots, most));
    // Pieces of at least mixed_percent of a CTA's share, plus one a sequence, plus rounding (schedule.cuh).
    if (tuning.mixed_percent) plan.mixed_percent = tuning.mixed_percent;
    plan.items = static_cast<int>(
        std::min<std::int64_t>(most, columns + static_cast<std::int64_t>(plan.cta_slots) * (100 + plan.mixed_percent) / plan.mixed_percent));
    return plan;
}

cudaError_t decode_attention(const DecodeShape& s, const DecodePlan& plan, DecodeParams params, cudaStream_t stream) {
    params.tiles = plan.tiles, params.max_splits = plan.max_splits, params.cta_slots = plan.cta_slots;
    params.ring_stages = plan.ring_stages, params.mixed_piece = 0.01f * plan.mixed_percent;
    if (plan.ring_stages == 0) return launch_generic_decode(s.format, plan.grid, params, stream);
    const DecodeVariant* v = find_variant(s.format, s.dtype);
    if (!v) return cudaErrorInvalidValue;
    const std::size_t bytes = shared_bytes(*v, plan.warps, plan.ring_stages, params.rotate_order != 0);
    const cudaError_t status =
        cudaFuncSetAttribute(v->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (status != cudaSuccess) return status;
    return launch(v->kernel, dim3(plan.grid), dim3(32 * plan.warps), bytes, stream, params);
}

}  // namespace quarot
