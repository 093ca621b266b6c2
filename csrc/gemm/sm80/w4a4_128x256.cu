// 128 tokens x 256 channels, 8 warps, 3 stages (72 KB): the tile for many tokens.
#include "gemm/sm80/w4a4_stream_k.h"

namespace quarot::sm80 {
namespace {
using Config = W4A4<cutlass::gemm::GemmShape<128, 256, 128>, cutlass::gemm::GemmShape<64, 64, 128>, 3>;
}

cudaError_t w4a4_128x256(GemmProblem const& p) {
    return launch<Config>(p);
}

std::size_t w4a4_128x256_workspace(GemmProblem const& p) {
    return workspace_bytes<Config>(p);
}

}  // namespace quarot::sm80
