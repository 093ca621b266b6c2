// RoPE in place on the output of a fused q/k/v projection. A head is read once, normalised if the family asks for it (Qwen3),
// rotated and written once, so a kernel moves 2 * (Hq + Hkv) * D elements a token. rope_vector_kernel takes the heads that there
// are, 16 bytes a load; rope_kernel, one warp per (token, head), any others.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/vec8.cuh"
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

unsigned blocks(const RopeParams& p) {
  return static_cast<unsigned>((p.tokens * (p.heads_q + p.heads_kv) + kWarps - 1) / kWarps);
}

constexpr int kVectorThreads = 256;

template <typename T>
__device__ __forceinline__ Vec8<T> load(const T* x) {
  return load8(x, 0, 8);
}

// Heads of 16 * LANES channels, all of them rotated, in 16 bits: a block takes a token, LANES neighbours a head, and each keeps
// the cosines and sines of its 2 * 8 channels for all heads.
template <typename T, int LANES>
__global__ void __launch_bounds__(kVectorThreads) rope_vector_kernel(RopeParams p) {
  constexpr int kHalf = 8 * LANES, kAtOnce = kVectorThreads / LANES;
  const int lane = threadIdx.x % LANES, heads = p.heads_q + p.heads_kv;
  const unsigned group = (LANES == 32 ? ~0u : (1u << LANES) - 1) << threadIdx.x % 32 / LANES * LANES;
  const int64_t row = blockIdx.x % static_cast<unsigned>(p.table_tokens);
  const T* const cos = static_cast<const T*>(p.cos) + row * 2 * kHalf + 8 * lane;
  const T* const sin = static_cast<const T*>(p.sin) + row * 2 * kHalf + 8 * lane;
  const Vec8<T> cos_lo = load(cos), cos_hi = load(cos + kHalf), sin_lo = load(sin), sin_hi = load(sin + kHalf);
  T* const token = static_cast<T*>(p.qkv) + blockIdx.x * p.row_stride + 8 * lane;
#pragma unroll 2
  for (int head = threadIdx.x / LANES; head < heads; head += kAtOnce) {
    T* const x = token + head * (2 * kHalf);
    Vec8<T> low = load(x), high = load(x + kHalf);
    float a[8], b[8], c[8], s[8], lo[8], hi[8];
    low.unpack(a);
    high.unpack(b);
    const T* const gain = static_cast<const T*>(head < p.heads_q ? p.q_norm : p.k_norm);
    if (gain != nullptr) {
      float square = 0.f;
#pragma unroll
      for (int j = 0; j < 8; ++j) square += a[j] * a[j] + b[j] * b[j];
#pragma unroll
      for (int offset = LANES / 2; offset > 0; offset >>= 1) square += __shfl_xor_sync(group, square, offset);
      const float scale = rsqrtf(square / (2 * kHalf) + p.eps);
      load(gain + 8 * lane).unpack(lo);
      load(gain + 8 * lane + kHalf).unpack(hi);
#pragma unroll
      for (int j = 0; j < 8; ++j) a[j] = a[j] * scale * lo[j], b[j] = b[j] * scale * hi[j];
    }
    cos_lo.unpack(c);
    sin_lo.unpack(s);
#pragma unroll
    for (int j = 0; j < 8; ++j) lo[j] = a[j] * c[j] - b[j] * s[j];
    cos_hi.unpack(c);
    sin_hi.unpack(s);
#pragma unroll
    for (int j = 0; j < 8; ++j) hi[j] = b[j] * c[j] + a[j] * s[j];
    low.pack(lo);
    high.pack(hi);
    store8(x, 0, low);
    store8(x, kHalf, high);
  }
}

template <typename T>
cudaError_t run(const RopeParams& p, cudaStream_t stream) {
  const auto aligned = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; };
  const bool vectors = sizeof(T) == 2 && p.rotary_dim == p.head_dim && p.row_stride % 8 == 0 && aligned(p.qkv) &&
                       aligned(p.cos) && aligned(p.sin) && aligned(p.q_norm) && aligned(p.k_norm) && p.tokens < 1 << 30;
  if constexpr (sizeof(T) == 2) {
    const unsigned tokens = static_cast<unsigned>(p.tokens);
    if (vectors && p.head_dim == 64)
      rope_vector_kernel<T, 4><<<tokens, kVectorThreads, 0, stream>>>(p);
    else if (vectors && p.head_dim == 128)
      rope_vector_kernel<T, 8><<<tokens, kVectorThreads, 0, stream>>>(p);
    else if (vectors && p.head_dim == 256)
      rope_vector_kernel<T, 16><<<tokens, kVectorThreads, 0, stream>>>(p);
    else
      rope_kernel<T><<<blocks(p), kWarps * 32, 0, stream>>>(p);
  } else {
    rope_kernel<T><<<blocks(p), kWarps * 32, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t rope(const RopeParams& p, cudaStream_t stream) {
  if (p.tokens * (p.heads_q + p.heads_kv) == 0) return cudaSuccess;
  if (p.head_dim > 64 * kMaxPairs || p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim) return cudaErrorInvalidValue;
  switch (p.type) {
    case RopeType::kHalf: return run<__half>(p, stream);
    case RopeType::kBFloat16: return run<__nv_bfloat16>(p, stream);
    default: return run<float>(p, stream);
  }
}

}  // namespace quarot
