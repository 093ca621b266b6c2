// 128 channels x 128 tokens with Stream-K: tiles that leave many SMs idle in their last wave.
#define QUAROT_NO_EARLY_LAUNCH
#include "gemm/sm90/stream_k.h"
#include "gemm/sm90/w4a8_rs.h"

namespace quarot::sm90 {
namespace {
using Config = W4A8<cute::Shape<cute::_128, cute::_128, cute::_128>, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                    cutlass::epilogue::TmaWarpSpecializedCooperative, cutlass::gemm::StreamKScheduler>;
}

cudaError_t w4a8_128x128_stream_k(GemmProblem const& p) { return launch<Config>(p); }

std::size_t w4a8_128x128_stream_k_workspace(GemmProblem const& p) { return workspace_bytes<Config>(p); }

}  // namespace quarot::sm90
