// Hopper GEMM for 17-128 tokens, hand-written: wgmma with the packed weights as register operand, K split over a
// cluster.
#pragma once

#include "gemm/skinny.h"

namespace quarot::sm90 {

/// Blocks of one cluster share `warpgroups` x 64 channels and split K; `tokens` (32, 64 or 128) is the width of one
/// pass.
struct SplitKConfig {
    int tokens;
    int warpgroups;  ///< 2 to 4
    int cluster;     ///< 1 to 8
};

/// int4 tiles, one scale a channel; any number of tokens (passes of `tokens`). Errors come back as cudaError_t.
cudaError_t w4a8_split_k(SkinnyProblem const& problem, SplitKConfig const& config);

}  // namespace quarot::sm90
