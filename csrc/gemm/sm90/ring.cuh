// What the Hopper GEMMs without CUTLASS's layers share: packed int4 weights x int8 activations, a ring of chunks of K in
// shared memory, producer warps that fill it through the copy engine, consumer warpgroups of 64 channels that empty it.
//
// A ring is described by a class R with
//   kChunk                       columns of K a stage
//   kTokens, kChannels           of a block's tile
//   kStages, kAlignment          of the ring; the base in shared memory is aligned by hand
//   kCodeBytes, kWeightBytes     of a stage: codes [tokens][chunk], weights [channels / 16][chunk / 32][256]
//   kCodes, kWeights, kBarriers  where they begin; two barriers a stage, full and empty
//   kPeers                       blocks that share the K of a tile
//   kOutTokens                   of a tile that one of them stores
#pragma once

#include "device/async_copy.cuh"
#include "device/launch.cuh"
#include "gemm/sm90/ring.h"
#include "gemm/sm90/tensor_map.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

namespace quarot::sm90 {

struct RingProblem {
    float const* row_scale;
    float const* weight_scale;
    float const* bias;
    int m, n;
    int chunks;  // of K
    int strips, channel_tiles, token_tiles;  // a strip is 64 channels
    int box_strips;                          // of the largest channel tile
    int token_group;                         // RingGrid
    bool bf16;
};

struct RingMaps {
    CUtensorMap codes, weight, out;
};

struct Tile {
    int channel, token;  // first ones
    int strips;          // of 64 channels
};

/// Channel tiles share the strips as evenly as they go, the larger ones first.
template <class R>
__device__ __forceinline__ Tile tile_at(RingProblem const& p, int index) {
    int const per_group = p.token_group * p.channel_tiles;
    int const group = index / per_group, inside = index % per_group;
    int const width = min(p.token_group, p.token_tiles - group * p.token_group);
    int const tile = inside / width, least = p.strips / p.channel_tiles, larger = p.strips % p.channel_tiles;
    return {(tile * least + min(tile, larger)) * 64, (group * p.token_group + inside % width) * R::kTokens,
            least + (tile < larger)};
}

/// What this block takes: every `step`th tile from `first` on, and of each the chunks [begin, end).
struct BlockShare {
    int first, step, begin, end;
};
template <class R>
__device__ __forceinline__ BlockShare block_share(RingProblem const& p) {
    if constexpr (R::kPeers == 1) return {int(blockIdx.x), int(gridDim.x), 0, p.chunks};
    int const peer = blockIdx.x % R::kPeers;
    return {int(blockIdx.x) / R::kPeers, int(gridDim.x) / R::kPeers, p.chunks * peer / R::kPeers,
            p.chunks * (peer + 1) / R::kPeers};
}

/// Where a warp is in the ring.
template <class R>
struct Position {
    int stage = 0, parity = 0;
    __device__ __forceinline__ void advance(int by = 1) {  // by a divisor of the number of stages
        stage += by;
        if (stage >= R::kStages) {
            stage -= R::kStages;
            parity ^= 1;
        }
    }
};

template <class R>
__device__ __forceinline__ uint32_t full_barrier(uint32_t base, int stage) {
    return base + R::kBarriers + stage * 16;
}
template <class R>
__device__ __forceinline__ uint32_t empty_barrier(uint32_t base, int stage) {
    return base + R::kBarriers + stage * 16 + 8;
}

template <class R>
__device__ __forceinline__ uint32_t ring_base(char const* shared) {
    return (shared_address(shared) + R::kAlignment - 1) / R::kAlignment * R::kAlignment;
}

/// By every thread of the block, before anything else.
template <class R>
__device__ __forceinline__ void init_ring(uint32_t base, int full_arrivals, int empty_arrivals) {
    if (threadIdx.x == 0) {
        for (int s = 0; s < R::kStages; ++s) {
            mbarrier_init(full_barrier<R>(base, s), full_arrivals);
            mbarrier_init(empty_barrier<R>(base, s), empty_arrivals);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
}

/// The copies of all weights that this block takes, by one warp. Two warps fill the ring, because one issues a copy only
/// every 180 clocks, and the codes of the first stages would come late.
///
/// EARLY: so many chunks before the wait and the rest behind it, so that the first codes find the way free; 0 is all.
template <class R, int EARLY = 0>
__device__ __forceinline__ void produce_weights(uint32_t base, RingProblem const& p, CUtensorMap const& map) {
    bool const leader = elect_one();
    if (leader) prefetch_map(map);
    int const tiles = p.channel_tiles * p.token_tiles;
    Position<R> at;
    BlockShare const share = block_share<R>(p);
    int early = EARLY;
    for (int index = share.first; index < tiles; index += share.step) {
        Tile const tile = tile_at<R>(p, index);
        for (int chunk = share.begin; chunk < share.end; ++chunk, at.advance()) {
            if (EARLY > 0 && early-- == 0) pdl_wait();
            mbarrier_wait(empty_barrier<R>(base, at.stage), at.parity ^ 1);
            if (leader) {
                mbarrier_expect(full_barrier<R>(base, at.stage), p.box_strips * 32 * R::kChunk);
                load_3d(base + R::kWeights + at.stage * R::kWeightBytes, map, 0, chunk * (R::kChunk / 32),
                        tile.channel / 16, full_barrier<R>(base, at.stage));
            }
            __syncwarp();
        }
    }
}

/// The copies of all codes, by another warp, which also says when the next kernel may start.
template <class R>
__device__ __forceinline__ void produce_codes(uint32_t base, RingProblem const& p, CUtensorMap const& map) {
    bool const leader = elect_one();
    if (leader) prefetch_map(map);
    int const tiles = p.channel_tiles * p.token_tiles;
    pdl_wait();
    Position<R> at;
    BlockShare const share = block_share<R>(p);
    for (int index = share.first; index < tiles; index += share.step) {
        Tile const tile = tile_at<R>(p, index);
        for (int chunk = share.begin; chunk < share.end; ++chunk, at.advance()) {
            mbarrier_wait(empty_barrier<R>(base, at.stage), at.parity ^ 1);
            if (leader) {
                mbarrier_expect(full_barrier<R>(base, at.stage), R::kCodeBytes);
                load_2d(base + R::kCodes + at.stage * R::kCodeBytes, map, chunk * R::kChunk, tile.token,
                        full_barrier<R>(base, at.stage));
            }
            __syncwarp();
        }
    }
    pdl_trigger();
}

/// The weights of this lane and 32 columns, as they stand in shared memory.
__device__ __forceinline__ void fetch_weights(uint32_t (&packed)[2], uint32_t shared) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(packed[0]), "=r"(packed[1]) : "r"(shared) : "memory");
}

/// Arrives at a named barrier without waiting there.
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void store_shared_16(uint32_t shared, uint32_t const* four) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(four[0]), "r"(four[1]), "r"(four[2]),
                 "r"(four[3])
                 : "memory");
}
__device__ __forceinline__ void load_shared_16(uint32_t (&four)[4], uint32_t shared) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four[0]), "=r"(four[1]), "=r"(four[2]), "=r"(four[3])
                 : "r"(shared)
                 : "memory");
}

/// 16 times the weights as bytes, an operand of wgmma: the low nibbles are rows 0-7 of the atom, the high ones rows 8-15.
__device__ __forceinline__ void widen_weights(uint32_t (&weights)[4], uint32_t const (&packed)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        weights[2 * i] = (packed[i] << 4) & 0xF0F0F0F0u;
        weights[2 * i + 1] = packed[i] & 0xF0F0F0F0u;
    }
}

template <bool BF16>
__device__ __forceinline__ uint32_t pack_16_bit(float2 value) {
    if constexpr (BF16) {
        __nv_bfloat162 const pair = __floats2bfloat162_rn(value.x, value.y);
        return reinterpret_cast<uint32_t const&>(pair);
    }
    __half2 const pair = __floats2half2_rn(value.x, value.y);
    return reinterpret_cast<uint32_t const&>(pair);
}

/// Bias of this lane's two channels; without one -0.0f: x + -0.0f is x, bit for bit.
__device__ __forceinline__ void load_bias(float (&bias)[2], RingProblem const& p, int channel) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
        bias[half] = p.bias != nullptr && channel + 8 * half < p.n ? p.bias[channel + 8 * half] : -0.0f;
}

/// Tokens of one store: the first ones are on their way while the next ones are converted.
constexpr int kStoredTokens = 64;

/// A warpgroup's 64 channels x TOKENS tokens to shared memory at `out` (token rows of 64 channels, swizzled by 16 bytes),
/// from where the copy engine stores them to column `channel`, row `token`. `scales(j)` gives whatever `value` needs to
/// know of the tokens 8j + 2 (lane % 4) + {0, 1}, `value(j, high, scales(j))` their outputs for channel
/// 16 warp + lane / 4 + 8 high. `barrier` is a named barrier of the warpgroup. Shared memory holds HELD of the tokens.
template <int TOKENS, int HELD, class Scales, class Value>
__device__ __forceinline__ void store_tile(CUtensorMap const& map, uint32_t out, int channel, int token, int barrier,
                                           bool bf16, Scales scales, Value value) {
    int const warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0) % 4, lane = threadIdx.x % 32;
    if (warp == 0 && lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    named_barrier(barrier, 128);  // the tile before has left shared memory
    constexpr int kPiece = std::min(TOKENS, kStoredTokens), kOthers = HELD / kPiece - 1;
#pragma unroll
    for (int first = 0; first < TOKENS; first += kPiece) {
        if (first >= HELD) {  // so has the piece that was where this one goes
            if (warp == 0 && lane == 0) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kOthers) : "memory");
            named_barrier(barrier, 128);
        }
        auto const convert = [&](auto is_bf16) {
#pragma unroll
            for (int j = first / 8; j < (first + kPiece) / 8; j += 2) {  // eight tokens each
                uint32_t packed[4];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    auto const scale = scales(j + i);
#pragma unroll
                    for (int high = 0; high < 2; ++high)
                        packed[2 * i + high] = pack_16_bit<decltype(is_bf16)::value>(value(j + i, high, scale));
                }
                int const row = (j % (HELD / 8) + lane / 16) * 8 + lane % 8, vector = 2 * warp + lane / 8 % 2;
                uint32_t const target = out + row * 128 + (vector ^ row % 8) * 16;
                asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(target),
                             "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                             : "memory");
            }
        };
        if (bf16)  // one branch, not two conversions of every value
            convert(std::true_type{});
        else
            convert(std::false_type{});
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        named_barrier(barrier, 128);
        if (warp == 0 && lane == 0) store_2d(map, out + first % HELD * 128, channel, token + first);
    }
}

/// By every consumer thread before it ends: what was stored has to have been read.
__device__ __forceinline__ void finish_stores() {
    if (threadIdx.x % 128 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/// Fills `maps` and `problem`.
template <class R>
cudaError_t describe(GemmProblem const& p, RingGrid const& grid, RingMaps& maps, RingProblem& problem) {
    problem.row_scale = p.row_scale;
    problem.weight_scale = p.weight_scale;
    problem.bias = p.bias;
    problem.m = p.m;
    problem.n = p.n;
    problem.chunks = (p.k + R::kChunk - 1) / R::kChunk;
    problem.strips = grid.strips;
    problem.channel_tiles = grid.channel_tiles;
    problem.token_tiles = grid.token_tiles;
    problem.box_strips = grid.strips_of(0);
    problem.token_group = grid.token_group();
    problem.bf16 = p.bf16;
    // Rows that may be read are said to exist: the copy engine is slower at filling in zeros.
    int const rows = std::max(p.m, std::min(problem.token_tiles * R::kTokens, p.readable_rows));
    cudaError_t error = make_tensor_map(maps.codes, CU_TENSOR_MAP_DATA_TYPE_UINT8, p.codes,
                                        {{uint64_t(p.k), 0, R::kChunk}, {uint64_t(rows), uint64_t(p.k), R::kTokens}},
                                        R::kChunk == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
    if (error != cudaSuccess) return error;
    error = make_tensor_map(maps.weight, CU_TENSOR_MAP_DATA_TYPE_UINT8, p.weight,
                            {{256, 0, 256},
                             {uint64_t(p.k / 32), 256, R::kChunk / 32},
                             {uint64_t((p.n + 15) / 16), uint64_t(p.k) * 8, uint32_t(4 * problem.box_strips)}},
                            CU_TENSOR_MAP_SWIZZLE_NONE);
    if (error != cudaSuccess) return error;
    return make_tensor_map(maps.out, CU_TENSOR_MAP_DATA_TYPE_UINT16, p.out,
                           {{uint64_t(p.n), 0, 64},
                            {uint64_t(p.m), uint64_t(p.ldd) * 2, uint32_t(std::min(R::kOutTokens, kStoredTokens))}},
                           CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace quarot::sm90
