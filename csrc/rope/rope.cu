// RoPE in place on the output of a fused q/k/v projection. One warp per (token, head): a head is read once, normalised
// if the family asks for it (Qwen3), rotated and written once, so the kernel moves 2 * (Hq + Hkv) * D elements a token.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "rope/rope.h"

namespace quarot {
namespace {

constexpr int kWarps = 8;
constexpr int kMaxPairs = 8;  // pairs of channels a lane holds: head_dim up to 2 * 32 * 8 = 512

template <typename T>
__device__ __forceinline__ float widen(T x) {
  return static_cast<float>(x);
}

template <typename T>
__device__ __forceinline__ T narrow(float x) {
  return static_cast<T>(x);
}

// A lane holds channels p and p + R/2 for p = lane, lane + 32, ..; channels from R to D are only normalised.
template <typename T>
__global__ void __launch_bounds__(kWarps * 32) rope_kernel(RopeParams p) {
  const int lane = threadIdx.x & 31;
  const int heads = p.heads_q + p.heads_kv;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5);
  if (item >= p.tokens * heads) return;
  const int64_t token = item / heads;
  const int head = static_cast<int>(item - token * heads);
  T* x = static_cast<T*>(p.qkv) + token * p.row_stride + static_cast<int64_t>(head) * p.head_dim;
  const T* gain = static_cast<const T*>(head < p.heads_q ? p.q_norm : p.k_norm);
  const int half = p.rotary_dim / 2;
  const int rest = p.head_dim - p.rotary_dim;

  float lo[kMaxPairs], hi[kMaxPairs], tail[2 * kMaxPairs];
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < kMaxPairs; ++i) {
    const int c = lane + 32 * i;
    lo[i] = c < half ? widen(x[c]) : 0.f;
    hi[i] = c < half ? widen(x[c + half]) : 0.f;
    square += lo[i] * lo[i] + hi[i] * hi[i];
  }
#pragma unroll
  for (int i = 0; i < 2 * kMaxPairs; ++i) {
    const int c = lane + 32 * i;
    tail[i] = c < rest ? widen(x[p.rotary_dim + c]) : 0.f;
    square += tail[i] * tail[i];
  }
  float scale = 1.f;
  if (gain != nullptr) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) square += __shfl_xor_sync(0xffffffffu, square, offset);
    scale = rsqrtf(square / static_cast<float>(p.head_dim) + p.eps);
  }
  const int64_t row = token % p.table_tokens;
  const T* cos = static_cast<const T*>(p.cos) + row * p.rotary_dim;
  const T* sin = static_cast<const T*>(p.sin) + row * p.rotary_dim;
#pragma unroll
  for (int i = 0; i < kMaxPairs; ++i) {
    const int c = lane + 32 * i;
    if (c >= half) break;
    const float a = gain ? lo[i] * scale * widen(gain[c]) : lo[i];
    const float b = gain ? hi[i] * scale * widen(gain[c + half]) : hi[i];
    x[c] = narrow<T>(a * widen(cos[c]) - b * widen(sin[c]));
    x[c + half] = narrow<T>(b * widen(cos[c + half]) + a * widen(sin[c + half]));
  }
  if (gain == nullptr) return;
#pragma unroll
  for (int i = 0; i < 2 * kMaxPairs; ++i) {
    const int c = lane + 32 * i;
    if (c < rest) x[p.rotary_dim + c] = narrow<T>(tail[i] * scale * widen(gain[p.rotary_dim + c]));
  }
}

}  // namespace

cudaError_t rope(const RopeParams& p, cudaStream_t stream) {
  const int64_t items = p.tokens * (p.heads_q + p.heads_kv);
  if (items == 0) return cudaSuccess;
  if (p.head_dim > 64 * kMaxPairs || p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim) return cudaErrorInvalidValue;
  const unsigned grid = static_cast<unsigned>((items + kWarps - 1) / kWarps);
  switch (p.type) {
    case RopeType::kHalf: rope_kernel<__half><<<grid, kWarps * 32, 0, stream>>>(p); break;
    case RopeType::kBFloat16: rope_kernel<__nv_bfloat16><<<grid, kWarps * 32, 0, stream>>>(p); break;
    case RopeType::kFloat: rope_kernel<float><<<grid, kWarps * 32, 0, stream>>>(p); break;
  }
  return cudaGetLastError();
}

}  // namespace quarot
