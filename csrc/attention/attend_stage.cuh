// The arithmetic of decode attention: S^T = K Q^T with tokens as M16 and query rows as N8, one stage of a warp at a time.
//
// Score of a token: s (q . code) + b sum(q); output: sum (p s) code + sum p b. Scale and offset never meet single codes.
#pragma once

#include <cuda_fp16.h>

#include "attention/fragment.cuh"
#include "attention/schedule.cuh"
#include "kv_cache/format.h"

namespace quarot {

constexpr int kTileRows = 8;
constexpr float kMasked = -1e30f;

template <int D, int KeyBits, int ValueBits, int KeyGroup, int ValueGroup, int Blocks_, bool Bf16_ = false>
struct DecodeConfig {
    static constexpr KVFormat kFormat{D, KeyBits, ValueBits, KeyGroup, ValueGroup};
    static constexpr int kD = D, kKeyBits = KeyBits, kValueBits = ValueBits;
    static constexpr int kKeyGroups = KeyBits == 16 ? 1 : D / KeyGroup;
    static constexpr int kValueGroups = ValueBits == 16 ? 1 : D / ValueGroup;
    static constexpr int kKeyGroup = D / kKeyGroups, kValueGroup = D / kValueGroups;
    static constexpr int kBlocks = Blocks_, kBlocksLog2 = Blocks_ == 4 ? 2 : Blocks_ == 2 ? 1 : 0;
    static constexpr bool kBf16 = Bf16_;  // raw 16-bit pools of a bf16 model; packed pools always compute in fp16
    static constexpr int kMmas = D / 16;
    static constexpr int kStageTokens = 16 * kBlocks;
    static constexpr int kBlockBytes = kFormat.block_bytes();
    static constexpr int kStageBytes = kBlocks * kBlockBytes;
    // 12 warps on an SM (4 CTAs of 3) leave 168 registers; wide heads, several groups and the many power-of-two classes
    // of narrow codes need more and get 8 or 9 warps.
    static constexpr bool kFewRegisters =
        D <= 128 && kKeyGroups == 1 && kValueGroups == 1 && code_classes(KeyBits) <= 2 && ValueBits != 3;
    static constexpr int kRegisterThreads = kFewRegisters || D == 64 ? 384 : 256;
    static constexpr int kRowStride = D + 4;  // of the merge area, floats: keeps float2 writes free of bank conflicts
    static_assert(kTileRows * kRowStride * 4 <= kStageBytes, "the merge reuses the warp's ring");
    static_assert((KeyBits == 16) == (ValueBits == 16), "mixes of raw and packed are served by the generic kernel");
    // p is scaled by a power of two before it is rounded to fp16 with the value scale, against underflow: at most
    // 65504 / (range of a group) keeps p s below the fp16 maximum for every group an fp16 model can produce.
    static constexpr float kProbabilityBias = ValueBits == 16 ? 0.0f : static_cast<float>(ValueBits);
};

// What a warp carries from stage to stage. A lane holds columns (query rows of the tile) 2 (lane % 4) and the next.
template <typename C>
struct WarpState {
    float out[C::kMmas][4];  // mma i: dims 16 i + 2 (lane / 4), + 1 (pairs of registers), both columns
    float max[2], sum[2];
    float offset_sum[C::kValueGroups][2];  // sum p b

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < C::kMmas; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) out[i][j] = 0.0f;
#pragma unroll
        for (int column = 0; column < 2; ++column) {
            max[column] = kMasked, sum[column] = 0.0f;
#pragma unroll
            for (int g = 0; g < C::kValueGroups; ++g) offset_sum[g][column] = 0.0f;
        }
    }

    // Sums over the tokens, which lie in different lanes; afterwards lanes of equal lane % 4 agree.
    __device__ __forceinline__ void add_lanes() {
#pragma unroll
        for (int column = 0; column < 2; ++column) {
#pragma unroll
            for (int distance = 4; distance <= 16; distance *= 2) {
                sum[column] += __shfl_xor_sync(kFullWarp, sum[column], distance);
#pragma unroll
                for (int g = 0; g < C::kValueGroups; ++g)
                    offset_sum[g][column] += __shfl_xor_sync(kFullWarp, offset_sum[g][column], distance);
            }
        }
    }

    // After add_lanes(): f(mma, column, outputs of dims 16 mma + 2 (lane / 4) and the next), unnormalised.
    template <typename F>
    __device__ __forceinline__ void for_each_output(F&& f) const {
        for_each_chunk<C::kD, plane_width(C::kValueBits)>([&](auto dims, auto base) {
            constexpr int kDims = decltype(dims)::value, kBase = decltype(base)::value;
            using Codes = ChunkCodes<C::kValueBits, kDims>;
            const auto step = [&](auto index) {
                constexpr int i = decltype(index)::value, kMma = kBase / 16 + i;
                constexpr int kGroup = kMma * 16 / C::kValueGroup;
                constexpr float kFactor =
                    C::kValueBits == 16 ? 1.0f : 16777216.0f / (1 << (Codes::kWidth * (i % Codes::kClasses)));
#pragma unroll
                for (int column = 0; column < 2; ++column) {
                    const float offset = C::kValueBits == 16 ? 0.0f : offset_sum[kGroup][column];
                    f(kMma, column, float2{out[kMma][column] * kFactor + offset, out[kMma][2 + column] * kFactor + offset});
                }
            };
            for_each_index<kDims / 16>(step);
        });
    }
};

// What the rows of a tile see: `start` <= j < `end` for the two columns of the lane, the first two numbers for all rows.
struct RowLimits {
    int end[2], start[2];
    int common_start, common_end;

    __device__ __forceinline__ RowLimits(const DecodeParams& p, int length, int tile, int rows, int lane) {
        const int first_end = p.causal ? length - p.tokens + 1 : length;  // of query token 0
        const auto end_of = [&](int row) { return p.tokens == 1 || !p.causal ? first_end : first_end + row / p.group; };
        const int first_row = tile * kTileRows, last_row = min(first_row + kTileRows, rows) - 1;
#pragma unroll
        for (int column = 0; column < 2; ++column) {
            end[column] = end_of(min(first_row + 2 * (lane % 4) + column, rows - 1));
            start[column] = p.window > 0 ? end[column] - p.window : 0;
        }
        common_end = end_of(first_row);
        common_start = p.window > 0 ? end_of(last_row) - p.window : 0;
    }

    __device__ __forceinline__ bool all_see(int token, int count) const {
        return token + count <= common_end && token >= common_start;
    }
};

// `Blocks` blocks of 16 tokens from `stage` on, of which the first `blocks` hold tokens.
template <typename C, bool Masked, int Blocks = C::kBlocks>
__device__ __forceinline__ void attend_stage(const std::uint8_t* stage, int blocks, int base_token, int length,
                                             const RowLimits& limits, const std::uint32_t (&query)[C::kMmas][2],
                                             const float (&query_sum)[C::kKeyGroups][2], float scale_log2,
                                             WarpState<C>& state, int lane) {
    constexpr KVFormat kFormat = C::kFormat;
    const int row = lane / 4;
    float score[Blocks][4];
#pragma unroll
    for (int block = 0; block < Blocks; ++block) {
        const std::uint8_t* codes = stage + block * C::kBlockBytes;
        constexpr int kClasses = code_classes(C::kKeyBits);
        float dot[C::kKeyGroups][kClasses][4];
#pragma unroll
        for (int i = 0; i < C::kKeyGroups * kClasses * 4; ++i) (&dot[0][0][0])[i] = 0.0f;
        for_each_chunk<C::kD, plane_width(C::kKeyBits)>([&](auto dims, auto base) {
            constexpr int kDims = decltype(dims)::value, kBase = decltype(base)::value;
            using Codes = ChunkCodes<C::kKeyBits, kDims>;
            Codes half[2];
            const std::uint8_t* plane = codes + 2 * kBase * Codes::kWidth;
            const std::uint8_t* high = codes + 4 * C::kD + 2 * kBase;
            half[0].load(plane, high, lane);
            half[1].load(plane + kDims * Codes::kWidth, high + kDims, lane);
            const auto step = [&](auto index) {
                constexpr int i = decltype(index)::value, kMma = kBase / 16 + i;
                mma<C::kBf16>(dot[kMma * 16 / C::kKeyGroup][i % Codes::kClasses], half[0].template operand<i, 0>(),
                              half[1].template operand<i, 0>(), half[0].template operand<i, 1>(),
                              half[1].template operand<i, 1>(), query[kMma][0], query[kMma][1]);
            };
            for_each_index<kDims / 16>(step);
        });
        if constexpr (C::kKeyBits == 16) {
#pragma unroll
            for (int i = 0; i < 4; ++i) score[block][i] = dot[0][0][i] * scale_log2;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) score[block][i] = 0.0f;
#pragma unroll
            for (int group = 0; group < C::kKeyGroups; ++group) {
                const std::uint8_t* params = codes + kFormat.param_offset(Side::kKey) + 64 * group + 4 * row;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 sb = __half22float2(*reinterpret_cast<const __half2*>(params + 32 * half));
                    const float scale = sb.x * (scale_log2 * 16777216.0f);  // 2^24: codes come as code x 2^-24
#pragma unroll
                    for (int column = 0; column < 2; ++column) {
                        float total = dot[group][kClasses - 1][2 * half + column];
#pragma unroll
                        for (int c = kClasses - 2; c >= 0; --c)
                            total = total * (1.0f / (1 << plane_width(C::kKeyBits))) + dot[group][c][2 * half + column];
                        score[block][2 * half + column] += scale * total + sb.y * query_sum[group][column];
                    }
                }
            }
        }
        if constexpr (Masked) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int token = base_token + 16 * block + row + 8 * (i / 2);
                const bool visible = block < blocks && token < limits.end[i % 2] && token >= limits.start[i % 2];
                score[block][i] = visible ? score[block][i] : kMasked;
            }
        }
    }

    float peak[2] = {kMasked, kMasked};
#pragma unroll
    for (int block = 0; block < Blocks; ++block)
#pragma unroll
        for (int i = 0; i < 4; ++i) peak[i % 2] = fmaxf(peak[i % 2], score[block][i]);
#pragma unroll
    for (int distance = 4; distance <= 16; distance *= 2) {
        peak[0] = fmaxf(peak[0], __shfl_xor_sync(kFullWarp, peak[0], distance));
        peak[1] = fmaxf(peak[1], __shfl_xor_sync(kFullWarp, peak[1], distance));
    }
    if (__any_sync(kFullWarp, peak[0] > state.max[0] || peak[1] > state.max[1])) {
        float factor[2];
#pragma unroll
        for (int column = 0; column < 2; ++column) {
            const float updated = fmaxf(state.max[column], peak[column]);
            factor[column] = exp2_approx(state.max[column] - updated);
            state.max[column] = updated;
            state.sum[column] *= factor[column];
#pragma unroll
            for (int group = 0; group < C::kValueGroups; ++group) state.offset_sum[group][column] *= factor[column];
        }
#pragma unroll
        for (int i = 0; i < C::kMmas; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) state.out[i][j] *= factor[j % 2];
    }
    const float shift[2] = {C::kProbabilityBias - state.max[0], C::kProbabilityBias - state.max[1]};

#pragma unroll
    for (int block = 0; block < Blocks; ++block) {
        const std::uint8_t* codes = stage + block * C::kBlockBytes;
        float p[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[i] = exp2_approx(score[block][i] + shift[i % 2]);
            if (Masked && score[block][i] == kMasked) p[i] = 0.0f;
            state.sum[i % 2] += p[i];
        }
        std::uint32_t weights[C::kValueGroups][2];
#pragma unroll
        for (int group = 0; group < C::kValueGroups; ++group) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float2 sb{1.0f, 0.0f};
                if constexpr (C::kValueBits != 16) {
                    sb = __half22float2(*reinterpret_cast<const __half2*>(
                        codes + kFormat.param_offset(Side::kValue) + 64 * group + 4 * row + 32 * half));
                    if (Masked && base_token + 16 * block + row + 8 * half >= length) sb = float2{0.0f, 0.0f};
                    state.offset_sum[group][0] += p[2 * half] * sb.y;
                    state.offset_sum[group][1] += p[2 * half + 1] * sb.y;
                }
                weights[group][half] =
                    transpose8x8(pack_pair<C::kBf16>(p[2 * half] * sb.x, p[2 * half + 1] * sb.x));
            }
        }
        std::uint32_t keep[2] = {kFullWarp, kFullWarp};  // raw values of unused slots may be NaN, and NaN x 0 is NaN
        if constexpr (Masked && C::kValueBits == 16) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int token = base_token + 16 * block + 8 * half + 2 * (lane % 4);
                keep[half] = (token < length ? 0x0000ffffu : 0u) | (token + 1 < length ? 0xffff0000u : 0u);
            }
        }
        for_each_chunk<C::kD, plane_width(C::kValueBits)>([&](auto dims, auto base) {
            constexpr int kDims = decltype(dims)::value, kBase = decltype(base)::value;
            using Codes = ChunkCodes<C::kValueBits, kDims>;
            Codes half[2];
            const std::uint8_t* plane = codes + kFormat.code_offset(Side::kValue) + 2 * kBase * Codes::kWidth;
            const std::uint8_t* high = codes + kFormat.code_offset(Side::kValue) + 4 * C::kD + 2 * kBase;
            half[0].load(plane, high, lane);
            half[1].load(plane + kDims * Codes::kWidth, high + kDims, lane);
            if constexpr (Masked && C::kValueBits == 16) {
#pragma unroll
                for (int i = 0; i < Codes::kWords; ++i) half[0].low[i] &= keep[0], half[1].low[i] &= keep[1];
            }
            const auto step = [&](auto index) {
                constexpr int i = decltype(index)::value, kMma = kBase / 16 + i;
                constexpr int kGroup = kMma * 16 / C::kValueGroup;
                mma<C::kBf16>(state.out[kMma], half[0].template operand<i, 0>(), half[0].template operand<i, 1>(),
                              half[1].template operand<i, 0>(), half[1].template operand<i, 1>(), weights[kGroup][0],
                              weights[kGroup][1]);
            };
            for_each_index<kDims / 16>(step);
        });
    }
}

}  // namespace quarot
