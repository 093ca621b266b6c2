// The Hopper kernels that cut K among several blocks: fewer output tiles than the GPU has places. Includes no CUTLASS.
#pragma once

#include "gemm/sm90/problem.h"

namespace quarot::sm90 {

/// A call whose K is cut into `parts` equal ones, each a multiple of 32. `counters` holds two zeros per output tile; the
/// kernel leaves zeros. The workspace needs no initial value.
struct SplitProblem {
    GemmProblem whole;
    int parts;
    unsigned* counters;
};

constexpr int split_tiles(GemmProblem const& p, int channels, int tokens) {
    return (p.n + channels - 1) / channels * ((p.m + tokens - 1) / tokens);
}

/// Bytes of workspace: every part of every tile may leave its int32 sums.
constexpr std::size_t split_workspace(GemmProblem const& p, int channels, int tokens, int parts) {
    return parts > 1 ? std::size_t(split_tiles(p, channels, tokens)) * parts * channels * tokens * 4 : 0;
}

cudaError_t w8a8_64x64_split(SplitProblem const& p);
cudaError_t w8a8_128x64_split(SplitProblem const& p);

}  // namespace quarot::sm90
