// int8 weights, 128 channels x 128 tokens; see w4a8_128x128_pingpong.cu for when this tile is the right one.
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
