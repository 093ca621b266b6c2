// int8 weights, 128 channels x 128 tokens, two consumer warpgroups on alternate tiles: where wider tiles leave SMs idle.
#include "gemm/sm90/kernels.h"
#include "gemm/sm90/w8a8_ss.h"

namespace quarot::sm90 {
namespace {
using Config = W8A8<cute::Shape<cute::_128, cute::_128, cute::_128>, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                    cutlass::epilogue::TmaWarpSpecialized>;
}

cudaError_t w8a8_128x128_pingpong(GemmProblem const& p) {
    return launch<Config>(p);
}

}  // namespace quarot::sm90
