// Binds csrc/rope: pointers and the stream arrive as integers, a failed launch becomes a RuntimeError.
#include <pybind11/pybind11.h>

#include "bindings/binding.h"
#include "rope/rope.h"

namespace quarot {

void bind_rope(pybind11::module_& m) {
  m.def("rope", [](std::uintptr_t qkv, std::uintptr_t cos, std::uintptr_t sin, std::uintptr_t q_norm, std::uintptr_t k_norm,
                   float eps, int64_t tokens, int64_t row_stride, int64_t table_tokens, int heads_q, int heads_kv, int head_dim,
                   int rotary_dim, int type, std::uintptr_t stream) {
    const RopeParams params{pointer(qkv),
                            pointer(cos),
                            pointer(sin),
                            pointer(q_norm),
                            pointer(k_norm),
                            eps,
                            tokens,
                            row_stride,
                            table_tokens,
                            heads_q,
                            heads_kv,
                            head_dim,
                            rotary_dim,
                            static_cast<RopeType>(type)};
    check(rope(params, pointer<CUstream_st>(stream)), "rope",
          {{"tokens", tokens}, {"query_heads", heads_q}, {"kv_heads", heads_kv}, {"head_dim", head_dim},
           {"rotary_dim", rotary_dim}});
  });
}

}  // namespace quarot
