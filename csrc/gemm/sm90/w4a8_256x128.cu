// 256 channels x 128 tokens: 65-128 tokens of wide layers (one token tile, half as many activation reads).
#include "gemm/sm90/kernels.h"
#include "gemm/sm90/w4a8_rs.h"

namespace quarot::sm90 {
namespace {
using Config = W4A8<cute::Shape<cute::_256, cute::_128, cute::_128>, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                    cutlass::epilogue::TmaWarpSpecializedCooperative>;
}

cudaError_t w4a8_256x128(GemmProblem const& p) {
    return launch<Config>(p);
}

}  // namespace quarot::sm90
