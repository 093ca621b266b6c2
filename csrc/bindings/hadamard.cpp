// Binds csrc/hadamard: pointers and the stream arrive as integers, a failed launch becomes a RuntimeError.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>

#include "bindings/binding.h"
#include "hadamard/any_size.h"
#include "hadamard/heads.h"
#include "hadamard/sm90/transform.h"

namespace quarot {
namespace {

void check_any_size(cudaError_t status, const char* op, const HadamardInput& in) {
    const HadamardShape& s = in.shape;
    check(status, op,
          {{"rows", in.rows}, {"blocks", s.blocks}, {"order", s.order}, {"pow2", s.pow2}, {"inner", s.inner}});
}

using Shape = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;  // blocks, order, pow2, inner
using Plan = std::tuple<int, int, int>;                                            // m, padded_m, tiles

HadamardInput any_size_input(std::uintptr_t x, int dtype, std::int64_t row_stride, std::int64_t rows, bool silu,
                             const Shape& shape, std::uintptr_t signs) {
    return {pointer(x), static_cast<DType>(dtype), row_stride, rows, silu,
            {std::get<0>(shape), std::get<1>(shape), std::get<2>(shape), std::get<3>(shape)},
            pointer<const std::uint32_t>(signs)};
}

}  // namespace

void bind_hadamard(pybind11::module_& m) {
    namespace py = pybind11;
    m.def(
        "hadamard_any_size",
        [](std::uintptr_t x, int dtype, std::int64_t row_stride, std::int64_t rows, const Shape& shape,
           std::uintptr_t signs, std::uintptr_t y, std::uintptr_t stream) {
            const auto input = any_size_input(x, dtype, row_stride, rows, false, shape, signs);
            check_any_size(hadamard_any_size(input, pointer(y), pointer<CUstream_st>(stream)), "hadamard", input);
        },
        py::arg("x"), py::arg("dtype"), py::arg("row_stride"), py::arg("rows"), py::arg("shape"), py::arg("signs"),
        py::arg("y"), py::arg("stream"));
    m.def(
        "hadamard_quantize_any_size",
        [](std::uintptr_t x, int dtype, std::int64_t row_stride, std::int64_t rows, bool silu, const Shape& shape,
           std::uintptr_t signs, std::uintptr_t codes, std::uintptr_t scale, float clip_over_qmax, int bits,
           int layout, std::uintptr_t stream) {
            const auto input = any_size_input(x, dtype, row_stride, rows, silu, shape, signs);
            check_any_size(hadamard_quantize_any_size(input, pointer(codes), pointer<float>(scale), clip_over_qmax, bits,
                                                      static_cast<CodeLayout>(layout), pointer<CUstream_st>(stream)),
                           "hadamard_quantize", input);
        },
        py::arg("x"), py::arg("dtype"), py::arg("row_stride"), py::arg("rows"), py::arg("silu"), py::arg("shape"),
        py::arg("signs"), py::arg("codes"), py::arg("scale"), py::arg("clip_over_qmax"), py::arg("bits"),
        py::arg("layout"), py::arg("stream"));
    m.def(
        "hadamard_heads_quantize",
        [](std::uintptr_t x, int dtype, std::int64_t row_stride, std::int64_t rows, int heads, int head_dim,
           std::uintptr_t signs, std::uintptr_t codes, std::uintptr_t scale, float clip_over_qmax, int bits,
           int layout, std::uintptr_t stream) {
            const HeadsInput input{pointer(x), static_cast<DType>(dtype), row_stride, rows, heads, head_dim,
                                   pointer<const std::uint32_t>(signs)};
            check(hadamard_heads_quantize(input, pointer(codes), pointer<float>(scale), clip_over_qmax, bits,
                                          static_cast<CodeLayout>(layout), pointer<CUstream_st>(stream)),
                  "hadamard_heads_quantize", {{"rows", rows}, {"heads", heads}, {"head_dim", head_dim}});
        },
        py::arg("x"), py::arg("dtype"), py::arg("row_stride"), py::arg("rows"), py::arg("heads"), py::arg("head_dim"),
        py::arg("signs"), py::arg("codes"), py::arg("scale"), py::arg("clip_over_qmax"), py::arg("bits"),
        py::arg("layout"), py::arg("stream"));
    m.def(
        "hadamard_plan_sm90",
        [](std::int64_t order, std::int64_t pow2) {
            const auto plan = sm90::plan_transform(order, pow2);
            return Plan{plan.m, plan.padded_m, plan.tiles};
        },
        "(m, padded_m, tiles) of the tensor-core transform for order x pow2; padded_m = 0 when there is none.",
        py::arg("order"), py::arg("pow2"));
    m.def(
        "hadamard_sm90",
        [](const Plan& plan, std::uintptr_t x, bool bfloat16, std::int64_t row_stride, int rows, bool silu,
           std::uintptr_t table, std::uintptr_t y, std::uintptr_t scale, float clip_over_qmax, int bits, int layout,
           std::uintptr_t stream) {
            sm90::TransformArgs args{};
            args.x = pointer(x), args.row_stride = row_stride, args.rows = rows, args.table = pointer(table);
            args.y = pointer(y), args.scale = pointer<float>(scale), args.clip_over_qmax = clip_over_qmax;
            args.bits = bits, args.layout = static_cast<CodeLayout>(layout);
            const auto [order, padded, tiles] = plan;
            check(sm90::launch_transform({order, padded, tiles}, args, silu, scale != 0, bfloat16,
                                         pointer<CUstream_st>(stream)),
                  "hadamard_sm90", {{"rows", rows}, {"m", order}, {"tiles", tiles}});
        },
        "Plain transform into y (scale = 0), or codes into y and scale.", py::arg("plan"), py::arg("x"),
        py::arg("bfloat16"), py::arg("row_stride"), py::arg("rows"), py::arg("silu"), py::arg("table"), py::arg("y"),
        py::arg("scale"), py::arg("clip_over_qmax"), py::arg("bits"), py::arg("layout"), py::arg("stream"));
}

}  // namespace quarot
