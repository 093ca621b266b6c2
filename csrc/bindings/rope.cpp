#include "rope/rope.h"

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace quarot {

void bind_rope(pybind11::module_& m) {
  m.def("rope", [](std::uintptr_t qkv, std::uintptr_t cos, std::uintptr_t sin, std::uintptr_t q_norm, std::uintptr_t k_norm,
                   float eps, int64_t tokens, int64_t row_stride, int64_t table_tokens, int heads_q, int heads_kv, int head_dim,
                   int rotary_dim, int type, std::uintptr_t stream) {
    const RopeParams params{reinterpret_cast<void*>(qkv),
                            reinterpret_cast<const void*>(cos),
                            reinterpret_cast<const void*>(sin),
                            reinterpret_cast<const void*>(q_norm),
                            reinterpret_cast<const void*>(k_norm),
                            eps,
                            tokens,
                            row_stride,
                            table_tokens,
                            heads_q,
                            heads_kv,
                            head_dim,
                            rotary_dim,
                            static_cast<RopeType>(type)};
    const cudaError_t status = rope(params, reinterpret_cast<cudaStream_t>(stream));
    if (status != cudaSuccess) {
      throw std::runtime_error("rope: " + std::string(cudaGetErrorString(status)) + " (tokens " + std::to_string(tokens) +
                               ", heads " + std::to_string(heads_q) + "+" + std::to_string(heads_kv) + ", head_dim " +
                               std::to_string(head_dim) + ", rotary_dim " + std::to_string(rotary_dim) + ")");
    }
  });
}

}  // namespace quarot
