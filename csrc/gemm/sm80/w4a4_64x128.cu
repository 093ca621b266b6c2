// 64 tokens x 128 channels, 4 warps, 5 stages (60 KB): up to 64 tokens.
#include "gemm/sm80/w4a4_stream_k.h"

namespace quarot::sm80 {
namespace {
using Config = W4A4<cutlass::gemm::GemmShape<64, 128, 128>, cutlass::gemm::GemmShape<32, 64, 128>, 5>;
}

cudaError_t w4a4_64x128(GemmProblem const& p) {
    return launch<Config>(p);
}

std::size_t w4a4_64x128_workspace(GemmProblem const& p) {
    return workspace_bytes<Config>(p);
}

cudaError_t w4a4_code_versions(CodeVersions& versions) {
    cudaFuncAttributes attributes{};
    cudaError_t const error = cudaFuncGetAttributes(&attributes, cutlass::Kernel2<Config::Kernel>);
    versions = {attributes.ptxVersion, attributes.binaryVersion};
    return error;
}

}  // namespace quarot::sm80
