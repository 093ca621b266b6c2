// 64 channels x 64 tokens, one consumer warpgroup, two blocks an SM, not persistent: 33-128 tokens, where larger tiles leave
// SMs idle and a block's time is the latency of its K loop.
#include "gemm/sm90/narrow.h"
#include "gemm/sm90/w4a8_rs.h"

namespace quarot::sm90 {
namespace {
constexpr int kHalfOfSharedMemory = 120000;
using Config = W4A8<cute::Shape<cute::_64, cute::_64, cute::_128>, cutlass::gemm::KernelTmaWarpSpecialized,
                    cutlass::epilogue::TmaWarpSpecialized, void, kHalfOfSharedMemory>;
}  // namespace

cudaError_t w4a8_64x64(GemmProblem const& p) { return launch<Config>(p); }

}  // namespace quarot::sm90
