// 128 channels x 128 tokens, both consumer warpgroups on one tile, K cut among the blocks of a tile.
#include "gemm/sm90/w4a8_rs.h"
#include "gemm/sm90/split_k.h"  // behind the above, which says how CUTLASS is configured

namespace quarot::sm90 {
namespace {
using Config = W4A8<cute::Shape<cute::_128, cute::_128, cute::_128>, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                    cutlass::epilogue::TmaWarpSpecializedCooperative>;
}  // namespace

cudaError_t w4a8_128x128_split(SplitProblem const& p) { return launch_split<Config>(p); }

}  // namespace quarot::sm90
