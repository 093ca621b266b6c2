#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace quarot {

enum class RopeType : int { kHalf = 0, kBFloat16 = 1, kFloat = 2 };

// Notation: T tokens, Hq query heads, Hkv key heads, D head_dim, R rotary dimensions (R <= D, even).
struct RopeParams {
  void* qkv;            // [T, row_stride] of `type`: Hq*D query, Hkv*D key, then anything; rotated in place
  const void* cos;      // [T / cos_repeat, R] of `type`
  const void* sin;      // same
  const void* q_norm;   // [D] of `type`, gain of a per-head RMSNorm before the rotation; null for none
  const void* k_norm;   // same for the keys
  float eps;
  int64_t tokens;
  int64_t row_stride;   // elements between two tokens of qkv
  int64_t table_tokens; // rows of cos/sin; token t reads row t % table_tokens
  int heads_q;
  int heads_kv;
  int head_dim;
  int rotary_dim;
  RopeType type;
};

// Rotary position embedding ("rotate half") of the query and key rows of a fused projection, in fp32, rounded once.
cudaError_t rope(const RopeParams& params, cudaStream_t stream);

}  // namespace quarot
