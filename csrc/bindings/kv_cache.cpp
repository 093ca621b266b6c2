// Binds csrc/kv_cache: pointers and the stream arrive as integers, a failed launch becomes a RuntimeError.
#include <pybind11/pybind11.h>

#include "bindings/binding.h"
#include "kv_cache/kv_append.h"
#include "kv_cache/rope_kv_append.h"

namespace quarot {
namespace {

void check_tokens(cudaError_t status, const char* op, const KVFormat& f, int tokens, int kv_heads) {
    check(status, op,
          {{"tokens", tokens}, {"kv_heads", kv_heads}, {"head_dim", f.head_dim}, {"key_bits", f.key_bits},
           {"value_bits", f.value_bits}, {"key_group", f.key_group}, {"value_group", f.value_group}});
}

}  // namespace

void bind_kv_cache(pybind11::module_& m) {
    namespace py = pybind11;
    m.def(
        "kv_append",
        [](std::uintptr_t pool, std::uintptr_t key, std::uintptr_t value, std::uintptr_t slots, std::uintptr_t signs,
           std::int64_t key_token_stride, std::int64_t key_head_stride, std::int64_t value_token_stride,
           std::int64_t value_head_stride, int head_dim, int key_bits, int value_bits, int key_group, int value_group,
           int dtype, int tokens, int kv_heads, int num_pages, int page_blocks, float key_clip, float value_clip,
           int rotate_order, int rotate_pow2, bool generic, std::uintptr_t stream) {
            const AppendParams p{pointer<std::uint8_t>(pool), pointer(key), pointer(value),
                                 pointer<std::int64_t>(slots), pointer<std::int8_t>(signs), key_token_stride,
                                 key_head_stride, value_token_stride, value_head_stride,
                                 KVFormat{head_dim, key_bits, value_bits, key_group, value_group},
                                 static_cast<DType>(dtype), tokens, kv_heads, num_pages, page_blocks, key_clip,
                                 value_clip, rotate_order, rotate_pow2};
            check_tokens(kv_append(p, generic, pointer<CUstream_st>(stream)), "kv_append", p.format, tokens, kv_heads);
        },
        py::arg("pool"), py::arg("key"), py::arg("value"), py::arg("slots"), py::arg("signs"),
        py::arg("key_token_stride"), py::arg("key_head_stride"), py::arg("value_token_stride"),
        py::arg("value_head_stride"), py::arg("head_dim"), py::arg("key_bits"), py::arg("value_bits"),
        py::arg("key_group"), py::arg("value_group"), py::arg("dtype"), py::arg("tokens"), py::arg("kv_heads"),
        py::arg("num_pages"), py::arg("page_blocks"), py::arg("key_clip"), py::arg("value_clip"),
        py::arg("rotate_order"), py::arg("rotate_pow2"), py::arg("generic"), py::arg("stream"));
    m.def(
        "kv_gather",
        [](std::uintptr_t pool, std::uintptr_t slots, std::uintptr_t key, std::uintptr_t value, int head_dim,
           int key_bits, int value_bits, int key_group, int value_group, int dtype, int tokens, int kv_heads,
           int num_pages, int page_blocks, std::uintptr_t stream) {
            const GatherParams p{pointer<std::uint8_t>(pool), pointer<std::int64_t>(slots), pointer(key), pointer(value),
                                 KVFormat{head_dim, key_bits, value_bits, key_group, value_group},
                                 static_cast<DType>(dtype), tokens, kv_heads, num_pages, page_blocks};
            check_tokens(kv_gather(p, pointer<CUstream_st>(stream)), "kv_gather", p.format, tokens, kv_heads);
        },
        py::arg("pool"), py::arg("slots"), py::arg("key"), py::arg("value"), py::arg("head_dim"), py::arg("key_bits"),
        py::arg("value_bits"), py::arg("key_group"), py::arg("value_group"), py::arg("dtype"), py::arg("tokens"),
        py::arg("kv_heads"), py::arg("num_pages"), py::arg("page_blocks"), py::arg("stream"));
    m.def(
        "rope_kv_append_serves",
        [](int head_dim, int key_bits, int value_bits, int key_group, int value_group, int rotary_dim) {
            return rope_kv_append_serves({head_dim, key_bits, value_bits, key_group, value_group}, rotary_dim);
        },
        py::arg("head_dim"), py::arg("key_bits"), py::arg("value_bits"), py::arg("key_group"), py::arg("value_group"),
        py::arg("rotary_dim"));
    m.def(
        "rope_kv_append",
        [](std::uintptr_t pool, std::uintptr_t qkv, std::uintptr_t cos, std::uintptr_t sin, std::uintptr_t query_norm,
           std::uintptr_t key_norm, std::uintptr_t query, std::uintptr_t slots, std::int64_t qkv_stride, int head_dim,
           int key_bits, int value_bits, int key_group, int value_group, int dtype, int tokens, int query_heads,
           int kv_heads, int num_pages, int page_blocks, int rotary_dim, int table_rows, float key_clip,
           float value_clip, float eps, int rotate, bool one_each, std::uintptr_t stream) {
            const RopeAppendParams p{pointer<std::uint8_t>(pool), pointer(qkv), pointer(cos), pointer(sin),
                                     pointer(query_norm), pointer(key_norm), pointer(query),
                                     pointer<std::int64_t>(slots), qkv_stride,
                                     KVFormat{head_dim, key_bits, value_bits, key_group, value_group},
                                     static_cast<DType>(dtype), tokens, query_heads, kv_heads, num_pages, page_blocks,
                                     rotary_dim, table_rows, key_clip, value_clip, eps, rotate, one_each};
            check_tokens(rope_kv_append(p, pointer<CUstream_st>(stream)), "rope_kv_append", p.format, tokens, kv_heads);
        },
        py::arg("pool"), py::arg("qkv"), py::arg("cos"), py::arg("sin"), py::arg("query_norm"), py::arg("key_norm"),
        py::arg("query"), py::arg("slots"), py::arg("qkv_stride"), py::arg("head_dim"), py::arg("key_bits"),
        py::arg("value_bits"), py::arg("key_group"), py::arg("value_group"), py::arg("dtype"), py::arg("tokens"),
        py::arg("query_heads"), py::arg("kv_heads"), py::arg("num_pages"), py::arg("page_blocks"),
        py::arg("rotary_dim"), py::arg("table_rows"), py::arg("key_clip"), py::arg("value_clip"), py::arg("eps"),
        py::arg("rotate"), py::arg("one_each"), py::arg("stream"));
}

}  // namespace quarot
