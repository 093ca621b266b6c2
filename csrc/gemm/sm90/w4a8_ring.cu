// Packed int4 weights with a scale a channel x int8 activations: wgmma into int32 sums over all of K.
//
// A block computes up to 64 * STRIPS channels x TOKENS tokens at a time, or half of their K where two (PEERS) share it. Two
// producer warps keep a ring of chunks of K in shared memory; a strip of 64 channels has one consumer warpgroup, or PARTS
// of them that take the chunks in turn (NOTES.md, "Ring").
#include "gemm/sm90/ring.h"

#include "device/cluster.cuh"
#include "gemm/sm90/ring.cuh"
#include "gemm/sm90/wgmma.cuh"

#include <algorithm>

namespace quarot::sm90 {
namespace {

/// Shared memory beside the ring, for each strip: an output [kHeldTokens][64] of 16 bits, the tokens' scales, and with PARTS
/// the sums of one part. GROUP: steps of 32 columns whose products are issued together. PEERS: blocks, a cluster.
template <int TOKENS, int STRIPS, int PARTS, int GROUP, int PEERS = 1>
struct Ring {
    static constexpr int kTokens = TOKENS, kStrips = STRIPS, kParts = PARTS, kGroup = GROUP, kChunk = 128;
    static constexpr int kPeers = PEERS, kOutTokens = TOKENS / PEERS;
    static constexpr int kHeldTokens = std::min(128, kOutTokens);  // of the output, in shared memory at a time
    static constexpr int kChannels = 64 * STRIPS, kConsumers = STRIPS * PARTS, kThreads = 128 * (1 + kConsumers);
    static constexpr int kCodeBytes = TOKENS * kChunk, kWeightBytes = kChannels * kChunk / 2;
    static constexpr int kOutBytes = kHeldTokens * 128, kScaleBytes = TOKENS * 4;
    static constexpr int kSumBytes = PARTS > 1 ? TOKENS * 256 : 0;
    // The tiles of decode steps leave shared memory and registers for the small kernels before and behind them, and the one
    // tile of 128 tokens that leaves registers, shared memory for two blocks.
    static constexpr bool kShares = TOKENS <= 64 && STRIPS <= 5, kSharesMemory = TOKENS == 128 && STRIPS == 1;
    static constexpr int kBudget = (kShares ? 211 : kSharesMemory ? 200 : 227) * 1024, kAlignment = 1024;
    static constexpr int kPeerBytes = PEERS > 1 ? STRIPS * (kOutTokens * 256 + 16) : 0;  // the other's sums, barriers
    static constexpr int kBesides = STRIPS * (kOutBytes + kScaleBytes + kSumBytes) + kPeerBytes + kAlignment;
    static constexpr int kStageBytes = kCodeBytes + kWeightBytes + 16;
    static constexpr int kStages = std::min(16, (kBudget - kBesides) / kStageBytes / PARTS * PARTS);
    static constexpr int kCodes = 0, kOut = kStages * kCodeBytes, kWeights = kOut + STRIPS * kOutBytes;
    static constexpr int kSums = kWeights + kStages * kWeightBytes, kScales = kSums + STRIPS * kSumBytes;
    static constexpr int kPeer = kScales + STRIPS * kScaleBytes, kBarriers = kPeer + kPeerBytes;
    static constexpr int kBytes = kBarriers + kStages * 16 + kAlignment;  // the base is aligned by hand
    // Registers of a thread: what the block is launched with is dealt out anew.
    static constexpr int kBound = !kShares ? kThreads : kThreads <= 640 ? 640 : 896;  // of launch: few registers each
    static constexpr int kPool = 65536 / kBound / 8 * 8 * (1 + kConsumers), kProducerRegisters = 24;
    static constexpr int kConsumerRegisters = std::min(240, (kPool - kProducerRegisters) / kConsumers / 8 * 8);
    static_assert(kBytes <= kBudget && kStages >= 4, "a ring that hides the latency of L2");
    static_assert(PEERS == 1 || (PEERS == 2 && kOutTokens % 16 == 0), "what the meeting is written for");
};

template <class R>
__global__ void __launch_bounds__(R::kBound, 1)
    ring_kernel(__grid_constant__ CUtensorMap const codes_map, __grid_constant__ CUtensorMap const weight_map,
                __grid_constant__ CUtensorMap const out_map, RingProblem const p) {
    constexpr int kSteps = R::kChunk / 32, kGroup = R::kGroup, kSums = R::kTokens / 2;
    constexpr int kScales = (R::kTokens + 127) / 128;  // of tokens, a thread
    extern __shared__ char raw[];
    uint32_t const base = ring_base<R>(raw);
    // A shuffle tells the compiler that the whole warp takes the same branch.
    int const warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
    int const warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0) % 4, lane = threadIdx.x % 32;
    uint32_t const peer_barriers = base + R::kPeer + R::kStrips * R::kOutTokens * 256;
    if constexpr (R::kPeers > 1) {
        if (threadIdx.x == 0) {
            for (int strip = 0; strip < R::kStrips; ++strip) mbarrier_init(peer_barriers + 16 * strip, 1);
            fence_mbarrier_init();
        }
        cluster_arrive_relaxed();
    }
    init_ring<R>(base, 2, 128 * R::kStrips);  // full: weights and codes; empty: the threads of a part

    if (warpgroup == 0) {
        if (R::kConsumers > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R::kProducerRegisters));
        if (warp == 0) produce_weights<R, R::kTokens == 128 ? 3 : 0>(base, p, weight_map);
        if (warp == 1) produce_codes<R>(base, p, codes_map);
        if constexpr (R::kPeers > 1) cluster_wait();
        return;
    }

    if (R::kConsumers > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R::kConsumerRegisters));
    int const consumer = (warpgroup - 1) % R::kStrips, part = (warpgroup - 1) / R::kStrips, thread = threadIdx.x % 128;
    int const own_16 = 4 * consumer + warp;  // of the tile's channels
    uint32_t const lane_weights = base + R::kWeights + own_16 * kSteps * 256 + lane * 8;
    uint32_t const out = base + R::kOut + consumer * R::kOutBytes;
    uint32_t const token_scales = base + R::kScales + consumer * R::kScaleBytes;
    uint32_t const from_peer = base + R::kPeer + consumer * R::kOutTokens * 256 + thread * 16;
    uint32_t const peer_barrier = peer_barriers + 16 * consumer;
    uint32_t const sums = base + R::kSums + consumer * R::kSumBytes + thread * 16;
    // Named barriers.
    int const stored = 1 + consumer, ready = 1 + R::kStrips + consumer, taken = 1 + 2 * R::kStrips + consumer;
    uint64_t const descriptor = swizzled_rows<R::kChunk>(base + R::kCodes);
    if (thread == 0) prefetch_map(out_map);
    pdl_wait();

    Position<R> at, done;
    at.stage = done.stage = part;
    auto release = [&] {  // by every lane for itself: the products that took its weights are complete
        mbarrier_arrive(empty_barrier<R>(base, done.stage), 1);
        done.advance(R::kParts);
    };
    int next = part, end = 0;  // chunks since the beginning: the next one of this part, the end of the tile
    bool owed = false;         // the other part has not said yet that it took the sums
    bool met = false;          // the other block
    BlockShare const share = block_share<R>(p);
    for (int index = share.first; index < p.channel_tiles * p.token_tiles; index += share.step) {
        Tile const tile = tile_at<R>(p, index);
        end += share.end - share.begin;
        int const count = R::kParts == 1 ? share.end - share.begin : max(0, (end - next + R::kParts - 1) / R::kParts);
        next += count * R::kParts;
        if (consumer >= tile.strips) {
            for (int i = 0; i < count; ++i, at.advance(R::kParts)) {
                mbarrier_wait(full_barrier<R>(base, at.stage), at.parity);
                release();
            }
            continue;
        }
        // Asked for now, used at the end. Rows past the end take the last one's scale and are not stored.
        float token_scale[kScales];
#pragma unroll
        for (int i = 0; i < kScales; ++i) token_scale[i] = p.row_scale[min(tile.token + thread + 128 * i, p.m - 1)];
        int const channel = tile.channel + own_16 * 16 + lane / 4;
        float scale[2], bias[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) scale[half] = p.weight_scale[min(channel + 8 * half, p.n - 1)];
        load_bias(bias, p, channel);

        uint32_t acc[kSums];
#pragma unroll
        for (int i = 0; i < kSums; ++i) acc[i] = 0;
        pin(acc);
        // One set of weights is prepared while a product may still read the other.
        uint32_t even[kGroup][4], odd[kGroup][4], packed[kGroup][2];
        uint64_t codes_of_packed = 0;
        auto fetch = [&](int first) {  // the weights of a group, from step `first` of a chunk on
            if (first == 0) mbarrier_wait(full_barrier<R>(base, at.stage), at.parity);
#pragma unroll
            for (int k = 0; k < kGroup; ++k)
                fetch_weights(packed[k], lane_weights + at.stage * R::kWeightBytes + (first + k) * 256);
            codes_of_packed = descriptor + at.stage * (R::kCodeBytes / 16) + 2 * first;
            if (first + kGroup == kSteps) at.advance(R::kParts);
        };
        // The products of `packed`. Behind the first of them the next group is fetched, if there is one.
        auto multiply = [&](uint32_t(&weights)[kGroup][4], bool releases, int following, bool fetches) {
            wgmma_wait<1>();  // the products before the last ones, whose operands `weights` held
            if (releases) release();
#pragma unroll
            for (int k = 0; k < kGroup; ++k) {
                widen_weights(weights[k], packed[k]);
                pin(weights[k]);  // here, not where the compiler would like it: between the products
            }
            uint64_t const codes = codes_of_packed;
            wgmma_fence();
            wgmma(acc, weights[0], codes, true);
            if (fetches) fetch(following);
#pragma unroll
            for (int k = 1; k < kGroup; ++k) wgmma(acc, weights[k], codes + 2 * k, true);
            wgmma_commit();
        };
        if (R::kParts == 1 || count > 0) {
            fetch(0);
            int left = count;
            if constexpr (kGroup == kSteps) {
#pragma unroll 1
                for (; left > 1; left -= 2) {
                    multiply(even, left != count, 0, true);
                    multiply(odd, left != count, 0, left > 2);
                }
                if (left > 0) multiply(even, left != count, 0, false);
                wgmma_wait<0>();
                if (count > 1) release();
            } else {
                // The last products stand behind the loop: ptxas serialises them all (C7513) where they are its end.
                static_assert(2 * kGroup == kSteps);
                multiply(even, false, kGroup, true);
#pragma unroll 1
                for (; left > 1; --left) {
                    multiply(odd, left != count, 0, true);
                    multiply(even, false, kGroup, true);
                }
                multiply(odd, left != count, 0, false);
                wgmma_wait<0>();
            }
            pin(acc);
            release();
        }

        if constexpr (R::kParts > 1) {  // the sums meet; int32, so that their order cannot matter
            static_assert(R::kParts == 2);
            if (part == 1) {
                if (owed) named_barrier(taken, 256);
                owed = true;
#pragma unroll
                for (int i = 0; i < kSums; i += 4) store_shared_16(sums + i * 512, &acc[i]);
                named_arrive(ready, 256);
                continue;
            }
            named_barrier(ready, 256);
#pragma unroll
            for (int i = 0; i < kSums; i += 4) {
                uint32_t other[4];
                load_shared_16(other, sums + i * 512);
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[i + j] += other[j];
            }
            named_arrive(taken, 256);
        }
        int first_token = 0;  // of those that this block stores
        if constexpr (R::kPeers > 1) {
            // Each of the two keeps the sums of half of the tokens and sends the other half.
            constexpr int kHalf = kSums / 2;
            int const peer = blockIdx.x % 2;
            if (thread == 0) expect_remote(peer_barrier, R::kOutTokens * 256);
            cluster_wait();  // the other block has started: its shared memory may be written
            met = true;
#pragma unroll
            for (int i = 0; i < kHalf; ++i) {
                uint32_t const low = acc[i], high = acc[kHalf + i];
                acc[i] = peer ? high : low, acc[kHalf + i] = peer ? low : high;
            }
#pragma unroll
            for (int i = 0; i < kHalf; i += 4)
                store_remote(from_peer + i * 512, peer_barrier, peer ^ 1,
                             make_uint4(acc[kHalf + i], acc[kHalf + i + 1], acc[kHalf + i + 2], acc[kHalf + i + 3]));
            wait_remote(peer_barrier);
#pragma unroll
            for (int i = 0; i < kHalf; i += 4) {
                uint32_t other[4];
                load_shared_16(other, from_peer + i * 512);
#pragma unroll
                for (int j = 0; j < 4; ++j) acc[i + j] += other[j];
            }
            first_token = peer * R::kOutTokens;
        }
#pragma unroll
        for (int i = 0; i < kScales; ++i)
            if (thread < R::kTokens)
                asm volatile("st.shared.f32 [%0], %1;" ::"r"(token_scales + (thread + 128 * i) * 4), "f"(token_scale[i])
                             : "memory");
        auto const scales = [&](int j) {
            float2 both;
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(both.x), "=f"(both.y)
                         : "r"(token_scales + first_token * 4 + j * 32 + lane % 4 * 8)
                         : "memory");
            return both;
        };
        auto const value = [&](int j, int high, float2 of_tokens) {
            auto const one = [&](uint32_t sum, float of_token) {
                float const exact = __fmul_rn(__int2float_rn(int(sum)), 0.0625f);  // the weights were 16 times as large
                return __fadd_rn(__fmul_rn(__fmul_rn(exact, of_token), scale[high]), bias[high]);
            };
            return float2{one(acc[4 * j + 2 * high], of_tokens.x), one(acc[4 * j + 2 * high + 1], of_tokens.y)};
        };
        store_tile<R::kOutTokens, R::kHeldTokens>(out_map, out, tile.channel + consumer * 64, tile.token + first_token,
                                                  stored, p.bf16, scales, value);
    }
    if constexpr (R::kPeers > 1)
        if (!met) cluster_wait();
    if (owed) named_barrier(taken, 256);
    finish_stores();
}

template <int TOKENS, int STRIPS, int PARTS, int GROUP, int PEERS = 1>
cudaError_t run(GemmProblem const& p) {
    using R = Ring<TOKENS, STRIPS, PARTS, GROUP, PEERS>;
    RingMaps maps;
    RingProblem problem;
    RingGrid const grid = ring_grid(p.m, p.n, R::kChannels, TOKENS, p.sm_count / PEERS);
    cudaError_t const error = describe<R>(p, grid, maps, problem);
    if (error != cudaSuccess) return error;
    int const tiles = grid.channel_tiles * grid.token_tiles;
    if (PEERS > 1 && (PEERS * tiles > p.sm_count || problem.chunks < PEERS)) return cudaErrorInvalidValue;  // meet once
    int const blocks = std::min(p.sm_count, PEERS * tiles);
    return launch(ring_kernel<R>, Grid{dim3(blocks), PEERS}, dim3(R::kThreads), R::kBytes, p.stream, maps.codes,
                  maps.weight, maps.out, problem);
}

}  // namespace

cudaError_t w4a8_ring(GemmProblem const& p, int channels, int tokens, int peers) {
    if (p.ldd % 8 != 0 || p.k % 32 != 0) return cudaErrorInvalidValue;
    if (peers > 1) {
        if (peers != 2) return cudaErrorInvalidValue;
        if (tokens == 32 && channels == 64) return run<32, 1, 2, 4, 2>(p);
        if (tokens == 32 && channels == 192) return run<32, 3, 1, 4, 2>(p);
        return tokens == 64 && channels == 64 ? run<64, 1, 2, 4, 2>(p) : cudaErrorInvalidValue;
    }
    // Few tokens keep a warpgroup busy for less long, so more products are prepared at once, as registers allow.
    if (tokens == 32) switch (channels) {
            case 64: return run<32, 1, 2, 4>(p);
            case 128: return run<32, 2, 1, 4>(p);
            case 192: return run<32, 3, 1, 4>(p);
        }
    if (tokens == 64) switch (channels) {
            case 64: return run<64, 1, 2, 4>(p);
            case 128: return run<64, 2, 1, 4>(p);
            case 192: return run<64, 3, 1, 4>(p);
            case 320: return run<64, 5, 1, 2>(p);
            case 384: return run<64, 6, 1, 2>(p);
        }
    if (tokens == 128) switch (channels) {
            case 64: return run<128, 1, 1, 4>(p);
            case 128: return run<128, 2, 1, 2>(p);
            case 192: return run<128, 3, 1, 2>(p);
        }
    return tokens == 256 && channels == 128 ? run<256, 2, 1, 2>(p) : cudaErrorInvalidValue;
}

}  // namespace quarot::sm90
