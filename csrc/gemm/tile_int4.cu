// GEMM for many tokens on mma.sync, int4 tiles: prefill with group scales on every architecture, with 6- and 8-bit
// activations on sm_80/86/89, and with float32 output.
//
// A block computes 128 channels x 128 tokens with 8 warps of 32 x 64. Weights go from global memory to registers one
// step (128 of K) ahead; activations pass through a four-stage cp.async ring. With groups, the int32 sums of a group
// are scaled and added to float32 sums in registers when the group ends: one chain of additions an output, in the order
// of the groups.
#include "gemm/skinny_formats.h"
#include "gemm/skinny_launch.cuh"

namespace quarot {
namespace skinny {
namespace {

constexpr int kTileChannels = 128, kTileTokens = 128, kThreads = 256;
constexpr int kStepUnits = 2, kStages = 4;
constexpr int kRowBytes = kStepUnits * kUnit + 16;  // an odd multiple of 16: ldmatrix reads hit all banks
constexpr int kStageBytes = kTileTokens * kRowBytes;
constexpr int kOutStride = kTileChannels + 4;  // float32 words from token to token of the output tile
constexpr int kSharedBytes = kStages * kStageBytes;
static_assert(kTileTokens * kOutStride * 4 <= kSharedBytes, "the output tile reuses the ring");

struct TileGeometry {
    int channel_tiles;
    int token_tiles;
    int token_group;  // token tiles that run next to each other, so that they find the weights in L2
};

template <bool GROUPED>
__global__ void __launch_bounds__(kThreads, 1) tile_kernel(SkinnyProblem const p, TileGeometry const g) {
    extern __shared__ __align__(128) char shared[];
    uint32_t const shared_address = uint32_t(__cvta_generic_to_shared(shared));
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    // Order of the tiles: token_group token tiles of one channel tile, then the next channel tile.
    int const per_group = g.token_group * g.channel_tiles;
    int const group_index = blockIdx.x / per_group, inside = blockIdx.x % per_group;
    int const group_tokens = min(g.token_group, g.token_tiles - group_index * g.token_group);
    int const token_begin = (group_index * g.token_group + inside % group_tokens) * kTileTokens;
    int const channel_begin = inside / group_tokens * kTileChannels;
    int const tokens = min(kTileTokens, p.m - token_begin);

    int const units = (p.k + kUnit - 1) / kUnit, steps = (units + kStepUnits - 1) / kStepUnits;
    int const strips = (p.n + 15) / 16;
    int const warp_strip = channel_begin / 16 + warp % 4 * 2;  // two strips a warp
    int const warp_token = warp / 4 * 64;                      // of the tile

    char const* weight[2];
#pragma unroll
    for (int s = 0; s < 2; ++s)  // strips past the end repeat the last one and are not stored
        weight[s] = Int4Tiles::lane_pointer(p.weight, min(warp_strip + s, strips - 1), p.k, p.n, lane);
    uint32_t w[kStepUnits][2][4], next[kStepUnits][2][4];
    auto load_weights = [&](uint32_t (&r)[kStepUnits][2][4], int step) {
        int const atoms = p.k / 32 - step * kStepUnits * 2;
#pragma unroll
        for (int u = 0; u < kStepUnits; ++u)
#pragma unroll
            for (int s = 0; s < 2; ++s)
                Int4Tiles::load(r[u][s], weight[s] + size_t(step) * kStepUnits * Int4Tiles::kUnitBytes, u, atoms, 0);
    };
    load_weights(w, 0);

    wait_for_previous_kernel();
    let_next_kernel_start();
    char const* const codes = static_cast<char const*>(p.codes) + size_t(token_begin) * p.k;
    auto load_codes = [&](int step) {
        constexpr int kVectors = kStepUnits * kUnit / 16;  // of a row
        if (step < steps) {
            int const vector = threadIdx.x % kVectors, column = step * kStepUnits * kUnit + vector * 16;
            uint32_t const target = shared_address + step % kStages * kStageBytes + vector * 16;
#pragma unroll
            for (int row = threadIdx.x / kVectors; row < kTileTokens; row += kThreads / kVectors)
                if (row < tokens && column < p.k)
                    copy_16_bytes(target + row * kRowBytes, codes + size_t(row) * p.k + column);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) load_codes(s);

    int acc[2][8][4] = {};
    float total[GROUPED ? 2 : 1][8][4] = {};
    int const group_units = GROUPED ? p.group_size / kUnit : 1;
    int unit_of_group = 0, group = 0;
    int const lane_channel = warp_strip * 16 + lane / 4;  // this lane's channels: + 8 * half + 16 * strip
    for (int step = 0; step < steps; ++step) {
        asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
        __syncthreads();
        load_codes(step + kStages - 1);
        if (step + 1 < steps) load_weights(next, step + 1);
        uint32_t const row =
            shared_address + step % kStages * kStageBytes + (warp_token + lane % 8) * kRowBytes + lane / 8 * 16;
#pragma unroll
        for (int u = 0; u < kStepUnits; ++u) {
            bool const ends_group = GROUPED && unit_of_group + 1 == group_units && group < p.groups;
            float scale[2][2];
            if (GROUPED && ends_group) {
#pragma unroll
                for (int s = 0; s < 2; ++s)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        int const n = min(lane_channel + 16 * s + 8 * half, p.n - 1);
                        scale[s][half] = p.weight_scale[size_t(n) * p.groups + group];
                    }
            }
            uint32_t a[2][2][4];
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                Int4Tiles::fragment(a[s][0], w[u][s], 0);
                Int4Tiles::fragment(a[s][1], w[u][s], 1);
            }
#pragma unroll
            for (int t = 0; t < 8; ++t) {
                uint32_t b[4];
                Int4Tiles::activations(b, row + t * 8 * kRowBytes + u * kUnit);
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    mma(acc[s][t], a[s][0], b[0], b[1]);
                    mma(acc[s][t], a[s][1], b[2], b[3]);
                }
            }
            if (GROUPED && ends_group) {
#pragma unroll
                for (int s = 0; s < 2; ++s)
#pragma unroll
                    for (int t = 0; t < 8; ++t)
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            float const part = __fmul_rn(float(acc[s][t][i]), Int4Tiles::kMultiplier);
                            float& sum = total[GROUPED ? s : 0][t][i];
                            sum = __fadd_rn(sum, __fmul_rn(part, scale[s][i / 2]));
                            acc[s][t][i] = 0;
                        }
                unit_of_group = -1;
                ++group;
            }
            ++unit_of_group;
        }
#pragma unroll
        for (int u = 0; u < kStepUnits; ++u)
#pragma unroll
            for (int s = 0; s < 2; ++s)
#pragma unroll
                for (int i = 0; i < 4; ++i) w[u][s][i] = next[u][s][i];
    }

    // Through shared memory, so that a warp stores consecutive channels of one token.
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    float* const tile = reinterpret_cast<float*>(shared);
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int t = 0; t < 8; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int const token = warp_token + t * 8 + lane % 4 * 2 + i % 2;
                int const channel = warp % 4 * 32 + s * 16 + lane / 4 + i / 2 * 8;
                tile[token * kOutStride + channel] =
                    GROUPED ? total[GROUPED ? s : 0][t][i] : __fmul_rn(float(acc[s][t][i]), Int4Tiles::kMultiplier);
            }
    __syncthreads();
    int const channel = threadIdx.x % kTileChannels, n = channel_begin + channel;
    if (n >= p.n) return;
    float const channel_scale = GROUPED ? 1.0f : p.weight_scale[n];
    float const bias = p.bias != nullptr ? p.bias[n] : -0.0f;  // x + -0.0f is x, bit for bit
    for (int token = threadIdx.x / kTileChannels; token < tokens; token += kThreads / kTileChannels) {
        float value = __fmul_rn(tile[token * kOutStride + channel], p.row_scale[token_begin + token]);
        if (!GROUPED) value = __fmul_rn(value, channel_scale);
        store(p.out, size_t(token_begin + token) * p.ldd + n, __fadd_rn(value, bias), p.type);
    }
}

template <bool GROUPED>
cudaError_t run_tile(SkinnyProblem const& p) {
    TileGeometry g;
    g.channel_tiles = (p.n + kTileChannels - 1) / kTileChannels;
    g.token_tiles = (p.m + kTileTokens - 1) / kTileTokens;
    g.token_group = std::min(8, g.token_tiles);
    return launch(tile_kernel<GROUPED>, dim3(g.channel_tiles * g.token_tiles), kThreads, kSharedBytes, p.stream, p, g);
}

}  // namespace
}  // namespace skinny

cudaError_t tile_int4(SkinnyProblem const& p) {
    if (p.groups == 0) return skinny::run_tile<false>(p);
    if (p.group_size % skinny::kUnit != 0) return cudaErrorInvalidValue;
    return skinny::run_tile<true>(p);
}

}  // namespace quarot
