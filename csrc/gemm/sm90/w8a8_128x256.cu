// int8 weights, 128 channels x 256 tokens, two consumer warpgroups on one tile: the fastest tile once it fills every SM.
#include "gemm/sm90/kernels.h"
#include "gemm/sm90/w8a8_ss.h"

namespace quarot::sm90 {
namespace {
using Config = W8A8<cute::Shape<cute::_128, cute::_256, cute::_128>, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                    cutlass::epilogue::TmaWarpSpecializedCooperative>;
}

cudaError_t w8a8_128x256(GemmProblem const& p) {
    return launch<Config>(p);
}

}  // namespace quarot::sm90
