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
constexpr int kMaskedTokens = 4096;  // capacity of a sequence up to which every stage takes the instructions that mask
constexpr int kMaxCluster = 8;    // what every GPU with clusters takes
constexpr int kClusterCtas = 3;   // of an SM at most
constexpr int kClusterTokens = 192;  // a column that a sequence can have: beyond, the work list is as fast or faster
constexpr int kClusterBatch = 1;  // sequences up to which clusters are used: they do not even out different lengths

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

int log2_or_minus_one(int x) {
    int shift = 0;
    while (1 << shift < x) ++shift;
    return 1 << shift == x ? shift : -1;
}

// Rings, mbarriers and the warps' (max, sum); the rotated queries of a tile.
std::size_t shared_bytes(const DecodeVariant& v, int warps, int stages, bool rotate) {
    return static_cast<std::size_t>(warps) * (stages * (v.stage_bytes + 8) + kTileRows * 8) +
           (rotate ? kTileRows * v.format.head_dim * 2 : 0);
}

// The same with the area in which a CTA of a cluster receives its slice of every warp's result (merge_cluster.cuh), and so
// much that an SM takes no more than `per_sm` CTAs: the device would rather fill a few SMs than share the work out.
std::size_t cluster_shared_bytes(const DecodeVariant& v, int warps, int stages, int cluster, int per_sm) {
    const int part_floats = v.format.head_dim / cluster * kTileRows + 4;
    const std::size_t needed = shared_bytes(v, warps, stages, true) +
                               static_cast<std::size_t>(warps) * cluster * part_floats * 4 +
                               static_cast<std::size_t>(warps) * (cluster - 1) * kTileRows * 8 + 8;
    // An SM keeps 1 KB for itself with every CTA, and hands out 128 bytes at a time.
    return std::max<std::size_t>(needed, current_device().shared_per_multiprocessor / (per_sm + 1) - 1024 + 128);
}

// Clusters of `cluster` CTAs with this much shared memory that the device holds at once; 0 where it takes none of them.
int resident_clusters(const DecodeVariant& v, int threads, std::size_t bytes, int cluster) {
#ifdef QUAROT_FORCE_CP_ASYNC
    return 0;
#endif
    if (current_device().capability < 90) return 0;
    const auto* kernel = reinterpret_cast<const void*>(v.cluster_kernel);
    if (!succeeded(allow_shared(kernel, bytes))) return 0;
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(cluster), config.blockDim = dim3(threads), config.dynamicSmemBytes = bytes;
    config.attrs = &attribute, config.numAttrs = 1;
    int count = 0;
    return succeeded(cudaOccupancyMaxActiveClusters(&count, kernel, &config)) ? count : 0;
}

// Fills in the cluster fields of a plan if clusters serve the shape: two CTAs an SM at most, all of them resident.
void plan_clusters(const DecodeVariant& v, const DecodeShape& s, const DecodeTuning& tuning, DecodePlan& plan) {
    const int columns = s.batch * s.kv_heads * plan.tiles, places = 2 * current_device().multiprocessors;
    if (!v.cluster_kernel || tuning.cluster == 1 || tuning.max_splits || tuning.mixed_percent) return;
    if (tuning.cluster == 0 && tuning.ctas_per_sm) return;
    if (tuning.cluster == 0 && (s.batch > kClusterBatch || s.max_tokens > kClusterTokens * columns)) return;
    int cluster = tuning.cluster ? tuning.cluster : kMaxCluster;
    while (cluster > 1 && (cluster > s.format.head_dim / 16 || columns * cluster > places)) cluster /= 2;
    const int warps = std::min(tuning.warps ? tuning.warps : kClusterThreads / 32, kClusterThreads / 32);
    const int stages = tuning.ring_stages ? tuning.ring_stages : 1;
    const int per_sm = tuning.ctas_per_sm ? tuning.ctas_per_sm : kClusterCtas;
    const auto bytes = [&] { return cluster_shared_bytes(v, warps, stages, cluster, per_sm); };
    while (cluster > 1 && resident_clusters(v, 32 * warps, bytes(), cluster) < columns) cluster /= 2;
    if (cluster < 2) return;
    plan.cluster = cluster, plan.warps = warps, plan.ring_stages = stages;
    plan.cta_slots = current_device().multiprocessors * per_sm;
    plan.grid = plan.items = columns * cluster;
    plan.max_splits = 1;
}

}  // namespace

DecodePlan decode_plan(const DecodeShape& s, const DecodeTuning& tuning) {
    const DecodeVariant* v = tuning.generic ? nullptr : find_variant(s.format, s.dtype);
    const int multiprocessors = current_device().multiprocessors;
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
        const std::size_t limit = current_device().shared_per_block;
        while (plan.warps > 1 && shared_bytes(*v, plan.warps, plan.ring_stages, true) + 1024 > limit) --plan.warps;
        const std::size_t bytes = shared_bytes(*v, plan.warps, plan.ring_stages, true);
        const auto* kernel = reinterpret_cast<const void*>(v->kernel);
        int resident = 1;  // also of a kernel that cannot run here: its launch will say why
        if (!succeeded(allow_shared(kernel, bytes)) ||
            !succeeded(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, 32 * plan.warps, bytes)))
            resident = 1;
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
    if (v) plan_clusters(*v, s, tuning, plan);
    return plan;
}

cudaError_t decode_attention(const DecodeShape& s, const DecodePlan& plan, DecodeParams params, cudaStream_t stream) {
    params.group = s.query_heads / s.kv_heads;
    params.page_shift = log2_or_minus_one(params.page_blocks);
    params.tiles = plan.tiles, params.max_splits = plan.max_splits, params.cta_slots = plan.cta_slots;
    params.ring_stages = plan.ring_stages, params.mixed_piece = 0.01f * plan.mixed_percent;
    params.always_masks = s.max_tokens <= kMaskedTokens;
    if (plan.ring_stages == 0) return launch_generic_decode(s.format, plan.grid, params, stream);
    const DecodeVariant* v = find_variant(s.format, s.dtype);
    if (!v) return cudaErrorInvalidValue;
    if (plan.cluster) {
        params.cluster = plan.cluster;
        params.slice_shift = log2_or_minus_one(s.format.head_dim / 16 / plan.cluster);
        const int per_sm = plan.cta_slots / current_device().multiprocessors;
        const std::size_t shared = cluster_shared_bytes(*v, plan.warps, plan.ring_stages, plan.cluster, per_sm);
        const dim3 grid(plan.cluster, s.kv_heads * plan.tiles, s.batch);
        return launch(v->cluster_kernel, {grid, plan.cluster}, dim3(32 * plan.warps), shared, stream, params);
    }
    const std::size_t bytes = shared_bytes(*v, plan.warps, plan.ring_stages, params.rotate_order != 0);
    return launch(v->kernel, dim3(plan.grid), dim3(32 * plan.warps), bytes, stream, params);
}

}  // namespace quarot
