// Binds csrc/attention: pointers and the stream arrive as integers, a failed launch becomes a RuntimeError.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "attention/decode_attention.h"
#include "attention/merge_partials.h"
#include "bindings/binding.h"

namespace quarot {

void bind_attention(pybind11::module_& m) {
    namespace py = pybind11;
    m.def(
        "decode_plan",
        [](int head_dim, int key_bits, int value_bits, int key_group, int value_group, int dtype, int batch, int tokens,
           int query_heads, int kv_heads, int max_tokens, int warps, int ring_stages, int ctas_per_sm, int max_splits,
           bool generic, int mixed_percent, int cluster) {
            const DecodeShape shape{KVFormat{head_dim, key_bits, value_bits, key_group, value_group},
                                    static_cast<DType>(dtype), batch, tokens, query_heads, kv_heads, max_tokens};
            const DecodePlan plan =
                decode_plan(shape, {warps, ring_stages, ctas_per_sm, max_splits, generic, mixed_percent, cluster});
            return py::make_tuple(plan.tiles, plan.max_splits, plan.cta_slots, plan.grid, plan.warps, plan.ring_stages,
                                  plan.mixed_percent, plan.items, plan.cluster);
        },
        py::arg("head_dim"), py::arg("key_bits"), py::arg("value_bits"), py::arg("key_group"), py::arg("value_group"),
        py::arg("dtype"), py::arg("batch"), py::arg("tokens"), py::arg("query_heads"), py::arg("kv_heads"),
        py::arg("max_tokens"), py::arg("warps") = 0, py::arg("ring_stages") = 0, py::arg("ctas_per_sm") = 0,
        py::arg("max_splits") = 0, py::arg("generic") = false, py::arg("mixed_percent") = 0,
        py::arg("cluster") = 0);
    m.def(
        "decode_attention",
        [](std::uintptr_t query, std::uintptr_t pool, std::uintptr_t page_table, std::uintptr_t lengths,
           std::uintptr_t out, std::uintptr_t lse, std::uintptr_t partial, std::uintptr_t max_sum,
           std::uintptr_t counters, std::uintptr_t signs, int head_dim, int key_bits, int value_bits, int key_group,
           int value_group, int dtype, int batch, int tokens, int query_heads, int kv_heads, int num_pages,
           int max_pages, int page_blocks, int window, bool causal, int rotate_order, int rotate_pow2, double scale, int tiles,
           int max_splits, int cta_slots, int grid, int warps, int ring_stages, int mixed_percent, int items,
           int cluster, std::uintptr_t stream) {
            const DecodeShape shape{KVFormat{head_dim, key_bits, value_bits, key_group, value_group},
                                    static_cast<DType>(dtype), batch, tokens, query_heads, kv_heads,
                                    max_pages * page_blocks * kBlockTokens};
            const DecodePlan plan{tiles, max_splits, cta_slots, grid, warps, ring_stages, mixed_percent, items, cluster};
            DecodeParams p{};
            p.query = pointer(query), p.pool = pointer<std::uint8_t>(pool), p.page_table = pointer<int>(page_table);
            p.lengths = pointer<int>(lengths), p.out = pointer(out), p.lse = pointer<float>(lse);
            p.partial = pointer<float>(partial), p.partial_max_sum = pointer<float>(max_sum);
            p.counters = pointer<int>(counters), p.rotation_signs = pointer<std::int8_t>(signs);
            p.dtype = shape.dtype, p.batch = batch, p.tokens = tokens;
            p.query_heads = query_heads, p.kv_heads = kv_heads;
            p.num_pages = num_pages, p.max_pages = max_pages, p.page_blocks = page_blocks, p.window = window, p.causal = causal;
            p.rotate_order = rotate_order, p.rotate_pow2 = rotate_pow2;
            p.scale_log2 = static_cast<float>(scale * 1.4426950408889634);
            check(decode_attention(shape, plan, p, pointer<CUstream_st>(stream)), "decode_attention",
                  {{"batch", batch}, {"tokens", tokens}, {"query_heads", query_heads}, {"kv_heads", kv_heads},
                   {"head_dim", head_dim}, {"key_bits", key_bits}, {"value_bits", value_bits}, {"grid", grid},
                   {"warps", warps}, {"cluster", cluster}});
        },
        py::arg("query"), py::arg("pool"), py::arg("page_table"), py::arg("lengths"), py::arg("out"), py::arg("lse"),
        py::arg("partial"), py::arg("max_sum"), py::arg("counters"), py::arg("signs"), py::arg("head_dim"),
        py::arg("key_bits"), py::arg("value_bits"), py::arg("key_group"), py::arg("value_group"), py::arg("dtype"),
        py::arg("batch"), py::arg("tokens"), py::arg("query_heads"), py::arg("kv_heads"), py::arg("num_pages"),
        py::arg("max_pages"), py::arg("page_blocks"), py::arg("window"), py::arg("causal"), py::arg("rotate_order"),
        py::arg("rotate_pow2"), py::arg("scale"), py::arg("tiles"), py::arg("max_splits"), py::arg("cta_slots"),
        py::arg("grid"), py::arg("warps"), py::arg("ring_stages"), py::arg("mixed_percent"), py::arg("items"),
        py::arg("cluster"), py::arg("stream"));
    m.def(
        "merge_partials",
        [](std::array<std::uintptr_t, 2> outs, std::array<std::uintptr_t, 2> lses,
           std::array<std::array<std::int64_t, 3>, 2> out_strides, std::array<std::array<std::int64_t, 3>, 2> lse_strides,
           std::array<int, 2> dtypes, std::uintptr_t out, std::uintptr_t lse, int dtype, int batch, int tokens, int heads,
           int head_dim, std::uintptr_t stream) {
            MergeParams p{};
            for (int i = 0; i < 2; ++i) {
                p.parts[i].out = pointer(outs[i]), p.parts[i].lse = pointer<float>(lses[i]);
                p.parts[i].dtype = static_cast<DType>(dtypes[i]);
                for (int k = 0; k < 3; ++k)
                    p.parts[i].out_stride[k] = out_strides[i][k], p.parts[i].lse_stride[k] = lse_strides[i][k];
            }
            p.out = pointer(out), p.lse = pointer<float>(lse), p.dtype = static_cast<DType>(dtype);
            p.batch = batch, p.tokens = tokens, p.heads = heads, p.head_dim = head_dim;
            check(merge_partials(p, pointer<CUstream_st>(stream)), "merge_partials",
                  {{"batch", batch}, {"tokens", tokens}, {"heads", heads}, {"head_dim", head_dim}});
        },
        py::arg("outs"), py::arg("lses"), py::arg("out_strides"), py::arg("lse_strides"), py::arg("dtypes"), py::arg("out"),
        py::arg("lse"), py::arg("dtype"), py::arg("batch"), py::arg("tokens"), py::arg("heads"), py::arg("head_dim"),
        py::arg("stream"));
}

}  // namespace quarot
