// 128 tokens x 128 channels, 4 warps, 4 stages (64 KB): 65-512 tokens, where wider tiles would be too few.
#include "gemm/sm80/w4a4_stream_k.h"

namespace quarot::sm80 {
namespace {
using Config = W4A4<cutlass::gemm::GemmShape<128, 128, 128>, cutlass::gemm::GemmShape<64, 64, 128>, 4>;
}

cudaError_t w4a4_128x128(GemmProblem const& p) {
    return launch<Config>(p);
}

std::size_t w4a4_128x128_workspace(GemmProblem const& p) {
    return workspace_bytes<Config>(p);
}

}  // namespace quarot::sm80
