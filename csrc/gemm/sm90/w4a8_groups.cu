// Packed int4 weights with a scale a group of K x int8 activations: wgmma into the int32 sums of a group, which are
// scaled and added to float32 sums in registers in the order of the groups.
//
// A block computes 64 * CONSUMERS channels x TOKENS tokens at a time. A producer warpgroup keeps a ring of chunks of K
// in shared memory; each consumer warpgroup has 64 channels, in two halves of the tokens: while the tensor cores multiply
// one half, its threads scale the sums of the other (NOTES.md, "Group scales").
#include "gemm/sm90/groups.h"
#include "gemm/sm90/ring.cuh"
#include "gemm/sm90/wgmma.cuh"

#include <algorithm>
#include <type_traits>

namespace quarot::sm90 {
namespace {

struct Problem : RingProblem {
    int groups;
    int chunks_of_group;  // group_size / CHUNK
};

/// Shared memory: for each stage codes [TOKENS][CHUNK], weights [channels / 16][CHUNK / 32][256], scales [channels] of
/// the group that ends in the chunk and two barriers; for each consumer an output [TOKENS][64].
template <int CHUNK, int TOKENS, int CONSUMERS>
struct Ring {
    static constexpr int kChunk = CHUNK, kTokens = TOKENS, kChannels = 64 * CONSUMERS, kThreads = 128 * (1 + CONSUMERS);
    static constexpr int kPeers = 1, kOutTokens = TOKENS;
    static constexpr int kCodeBytes = TOKENS * CHUNK, kWeightBytes = kChannels * CHUNK / 2;
    static constexpr int kScaleBytes = kChannels * 4, kOutBytes = TOKENS * 128;
    static constexpr int kBlocks = CONSUMERS > 1 || TOKENS > 64 ? 1 : TOKENS > 32 ? 2 : 3;  // of an SM
    static constexpr int kBudget = 228 * 1024 / kBlocks - 1024, kAlignment = 1024;
    static constexpr int kStageBytes = kCodeBytes + kWeightBytes + kScaleBytes + 16;
    static constexpr int kStages = std::min(16, (kBudget - CONSUMERS * kOutBytes - kAlignment) / kStageBytes);
    static constexpr int kCodes = 0, kOut = kStages * kCodeBytes, kWeights = kOut + CONSUMERS * kOutBytes;
    static constexpr int kScales = kWeights + kStages * kWeightBytes, kBarriers = kScales + kStages * kScaleBytes;
    static constexpr int kBytes = kBarriers + kStages * 16 + kAlignment;  // the base is aligned by hand
    static_assert(kBytes <= kBudget && kStages >= 4, "a ring that hides the latency of L2");
};

/// sum += float(acc) * scale, each step rounded by itself.
template <int N>
__device__ __forceinline__ void add_scaled(float (&sum)[N], uint32_t const (&acc)[N], float const (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
        sum[i] = __fadd_rn(sum[i], __fmul_rn(__int2float_rn(int(acc[i])), scale[i / 2 % 2]));
}

/// A copy by this thread alone (cp.async).
__device__ __forceinline__ void copy_4_bytes(uint32_t shared, void const* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

/// One of the barrier's arrivals, when the cp.async copies that this thread has made so far are complete.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

template <int CHUNK, int TOKENS, int CONSUMERS, bool EVERY>  // EVERY: each chunk is a group
__global__ void __launch_bounds__(Ring<CHUNK, TOKENS, CONSUMERS>::kThreads, Ring<CHUNK, TOKENS, CONSUMERS>::kBlocks)
    groups_kernel(__grid_constant__ CUtensorMap const codes_map, __grid_constant__ CUtensorMap const weight_map,
                  __grid_constant__ CUtensorMap const out_map, Problem const p) {
    using R = Ring<CHUNK, TOKENS, CONSUMERS>;
    constexpr int kSteps = CHUNK / 32, kSums = TOKENS / 4;  // sums of a thread and half
    extern __shared__ char raw[];
    uint32_t const base = ring_base<R>(raw);
    // A shuffle tells the compiler that the whole warp takes the same branch.
    int const warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    int const warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0) % 4, lane = threadIdx.x % 32;
    int const tiles = p.channel_tiles * p.token_tiles;
    // Full: weights, codes, and a warp that copies scales. Empty: every consumer thread.
    init_ring<R>(base, 2 + 32, 128 * CONSUMERS);

    Position<R> at;
    if (warpgroup == 0) {
        if (CONSUMERS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp == 0) {
            produce_weights<R>(base, p, weight_map);
        } else if (warp == 1) {
            produce_codes<R>(base, p, codes_map);
        } else if (warp == 2) {
            for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
                Tile const tile = tile_at<R>(p, index);
                int group = 0, left = p.chunks_of_group;
                for (int chunk = 0; chunk < p.chunks; ++chunk, at.advance()) {
                    mbarrier_wait(empty_barrier<R>(base, at.stage), at.parity ^ 1);
                    if (--left == 0) {
                        uint32_t const target = base + R::kScales + at.stage * R::kScaleBytes;
#pragma unroll
                        for (int i = lane; i < R::kChannels; i += 32) {
                            size_t const channel = min(tile.channel + i, p.n - 1);
                            copy_4_bytes(target + 4 * i, p.weight_scale + channel * p.groups + group);
                        }
                        left = p.chunks_of_group;
                        ++group;
                    }
                    arrive_after_copies(full_barrier<R>(base, at.stage));
                }
            }
            asm volatile("cp.async.wait_all;" ::: "memory");
        }
        return;
    }

    if (CONSUMERS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    pdl_wait();
    int const consumer = warpgroup - 1;
    int const strip = 4 * consumer + warp;  // of the tile: this warp's 16 channels
    uint32_t const lane_weights = base + R::kWeights + strip * kSteps * 256 + lane * 8;
    uint32_t const lane_scales = base + R::kScales + (strip * 16 + lane / 4) * 4;
    uint32_t const out = base + R::kOut + consumer * R::kOutBytes;
    uint64_t const descriptor = swizzled_rows<CHUNK>(base + R::kCodes);

    // Of even and odd chunks: one set is loaded while a product may still read the other.
    uint32_t weights[2][kSteps][4];
    float scale[2][2];
    auto load = [&](int set) {
        mbarrier_wait(full_barrier<R>(base, at.stage), at.parity);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
            uint32_t packed[2];
            fetch_weights(packed, lane_weights + at.stage * R::kWeightBytes + k * 256);
            widen_weights(weights[set][k], packed);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t const address = lane_scales + at.stage * R::kScaleBytes + half * 32;
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale[set][half]) : "r"(address) : "memory");
            scale[set][half] *= 0.0625f;  // exact from 2^-122 on
        }
    };

    for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
        Tile const tile = tile_at<R>(p, index);
        uint32_t acc[2][kSums];
        float sum[2][kSums];
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            acc[0][i] = acc[1][i] = 0;
            sum[0][i] = sum[1][i] = 0.0f;
        }
        int left = p.chunks_of_group;  // chunks of the group, this one included
        auto multiply = [&](int half, int set) {
            uint64_t const codes = descriptor + at.stage * (R::kCodeBytes / 16) + half * (R::kCodeBytes / 32);
            pin(acc[half]);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kSteps; ++k)
                wgmma(acc[half], weights[set][k], codes + 2 * k, k > 0 || (!EVERY && left != p.chunks_of_group));
            wgmma_commit();
        };
        // Straight-line code with no product in flight at its ends: ptxas has to see which one is complete where, and
        // serialises them when one is in flight around a loop.
        auto multiply_chunks = [&](auto count, bool last) {
            constexpr int kCount = decltype(count)::value;
            multiply(0, 0);
#pragma unroll
            for (int c = 0; c < kCount; ++c) {
                bool const ends_group = EVERY || left == 1;
                int const stage = at.stage;
                multiply(1, c);
                at.advance();
                left = ends_group ? p.chunks_of_group : left - 1;
                wgmma_wait<1>();
                pin(acc[0]);
                if (ends_group) add_scaled(sum[0], acc[0], scale[c]);
                if (c + 1 < kCount || !last) load((c + 1) % 2);
                if (c + 1 < kCount) {
                    multiply(0, c + 1);
                    wgmma_wait<1>();
                } else {
                    wgmma_wait<0>();
                }
                pin(acc[1]);
                mbarrier_arrive(empty_barrier<R>(base, stage), 1);
                if (ends_group) add_scaled(sum[1], acc[1], scale[c]);
            }
        };
        load(0);
        for (int chunk = 2; chunk <= p.chunks; chunk += 2)
            multiply_chunks(std::integral_constant<int, 2>{}, chunk == p.chunks);
        if (p.chunks % 2 != 0) multiply_chunks(std::integral_constant<int, 1>{}, true);

        float bias[2];
        load_bias(bias, p, tile.channel + strip * 16 + lane / 4);
        auto const scales = [&](int j) {
            int const token = tile.token + j * 8 + lane % 4 * 2;
            // Rows past the end take the last one's scale and are not stored.
            return float2{p.row_scale[min(token, p.m - 1)], p.row_scale[min(token + 1, p.m - 1)]};
        };
        auto const value = [&](int j, int high, float2 scale) {
            float const* const sums = &sum[j / (TOKENS / 16)][4 * (j % (TOKENS / 16)) + 2 * high];
            return float2{__fadd_rn(__fmul_rn(sums[0], scale.x), bias[high]),
                          __fadd_rn(__fmul_rn(sums[1], scale.y), bias[high])};
        };
        store_tile<TOKENS, TOKENS>(out_map, out, tile.channel + consumer * 64, tile.token, 1 + consumer, p.bf16, scales,
                                   value);
    }
    finish_stores();
}

template <int CHUNK, int TOKENS, int CONSUMERS, bool EVERY>
cudaError_t run(GemmProblem const& p, int group_size) {
    using R = Ring<CHUNK, TOKENS, CONSUMERS>;
    RingMaps maps;
    Problem problem;
    RingGrid grid{0, (p.n + R::kChannels - 1) / R::kChannels, (p.m + TOKENS - 1) / TOKENS};
    grid.strips = grid.channel_tiles * CONSUMERS;  // tiles of one height
    cudaError_t error = describe<R>(p, grid, maps, problem);
    if (error != cudaSuccess) return error;
    problem.groups = p.k / group_size;
    problem.chunks_of_group = group_size / CHUNK;
    auto const kernel = groups_kernel<CHUNK, TOKENS, CONSUMERS, EVERY>;
    int const blocks = std::min(p.sm_count * R::kBlocks, problem.channel_tiles * problem.token_tiles);
    return launch(kernel, dim3(blocks), dim3(R::kThreads), R::kBytes, p.stream, maps.codes, maps.weight, maps.out, problem);
}

template <int TOKENS, int CONSUMERS>
cudaError_t run(GemmProblem const& p, int group_size) {
    if (group_size == 128) return run<128, TOKENS, CONSUMERS, true>(p, group_size);
    if (group_size == 64) return run<64, TOKENS, CONSUMERS, true>(p, group_size);
    if (group_size % 128 == 0) return run<128, TOKENS, CONSUMERS, false>(p, group_size);
    return run<64, TOKENS, CONSUMERS, false>(p, group_size);
}

}  // namespace

cudaError_t w4a8_groups(GemmProblem const& p, int group_size, int channels, int tokens) {
    if (group_size <= 0 || group_size % 64 != 0 || p.k % group_size != 0 || p.ldd % 8 != 0) return cudaErrorInvalidValue;
    if (channels > 64) return run<128, 2>(p, group_size);
    if (tokens > 64) return run<128, 1>(p, group_size);
    return tokens > 32 ? run<64, 1>(p, group_size) : run<32, 1>(p, group_size);
}

}  // namespace quarot::sm90
