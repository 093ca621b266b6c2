// 128 channels x 64 tokens: few tokens, and narrow layers that larger tiles would leave without enough tiles.
#include "gemm/sm90/kernels.h"
#include "gemm/sm90/w4a8_rs.h"

namespace quarot::sm90 {
namespace {
using Config = W4A8<cute::Shape<cute::_128, cute::_64, cute::_128>, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                    cutlass::epilogue::TmaWarpSpecializedCooperative>;
}

cudaError_t w4a8_128x64(GemmProblem const& p) {
    return launch<Config>(p);
}

}  // namespace quarot::sm90
