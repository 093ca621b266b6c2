// 64 channels x 64 tokens, two blocks an SM, K cut among the blocks of a tile.
#include "gemm/sm90/w4a8_rs.h"
#include "gemm/sm90/split_k.h"  // behind the above, which says how CUTLASS is configured

namespace quarot::sm90 {
namespace {
constexpr int kHalfOfSharedMemory = 120000;
using Config = W4A8<cute::Shape<cute::_64, cute::_64, cute::_128>, cutlass::gemm::KernelTmaWarpSpecialized,
                    cutlass::epilogue::TmaWarpSpecialized, void, kHalfOfSharedMemory>;
}  // namespace

cudaError_t w4a8_64x64_split(SplitProblem const& p) { return launch_split<Config, 2>(p); }

}  // namespace quarot::sm90
