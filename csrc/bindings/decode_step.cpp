// Binds csrc/decode_step: pointers and the stream arrive as integers, a failed launch becomes a RuntimeError.
#include <pybind11/pybind11.h>

#include "bindings/binding.h"
#include "decode_step/argmax_rows.h"
#include "decode_step/begin_step.h"

namespace quarot {
namespace {

void check_rows(cudaError_t status, const char* op, int rows, std::int64_t width) {
    check(status, op, {{"rows", rows}, {"width", width}});
}

}  // namespace

void bind_decode_step(pybind11::module_& m) {
    namespace py = pybind11;
    m.def(
        "begin_step",
        [](std::uintptr_t ids, std::uintptr_t embedding, std::uintptr_t before, std::uintptr_t positions,
           std::uintptr_t table, std::uintptr_t inverse_frequency, std::uintptr_t hidden, std::uintptr_t lengths,
           std::uintptr_t slots, std::uintptr_t cos, std::uintptr_t sin, std::int64_t vocabulary,
           std::int64_t hidden_bytes, int batch, int width, int page_size, int rotary_dim, float scaling, int dtype,
           bool advance, std::uintptr_t stream) {
            const BeginStepParams p{pointer<std::int64_t>(ids), pointer(embedding), pointer<std::int32_t>(before),
                                    pointer<std::int64_t>(positions), pointer<std::int32_t>(table),
                                    pointer<float>(inverse_frequency), pointer(hidden), pointer<std::int32_t>(lengths),
                                    pointer<std::int64_t>(slots), pointer(cos), pointer(sin), vocabulary, hidden_bytes,
                                    batch, width, page_size, rotary_dim, scaling, static_cast<DType>(dtype), advance};
            check_rows(begin_step(p, pointer<CUstream_st>(stream)), "begin_step", batch, hidden_bytes);
        },
        py::arg("ids"), py::arg("embedding"), py::arg("before"), py::arg("positions"), py::arg("table"),
        py::arg("inverse_frequency"), py::arg("hidden"), py::arg("lengths"), py::arg("slots"), py::arg("cos"),
        py::arg("sin"), py::arg("vocabulary"), py::arg("hidden_bytes"), py::arg("batch"), py::arg("width"),
        py::arg("page_size"), py::arg("rotary_dim"), py::arg("scaling"), py::arg("dtype"), py::arg("advance"),
        py::arg("stream"));
    m.def(
        "argmax_rows",
        [](std::uintptr_t logits, int dtype, std::int64_t row_stride, int rows, int columns, std::uintptr_t out,
           std::uintptr_t stream) {
            check_rows(argmax_rows(pointer(logits), static_cast<DType>(dtype), row_stride, rows, columns,
                              pointer<std::int64_t>(out), pointer<CUstream_st>(stream)),
                  "argmax_rows", rows, columns);
        },
        py::arg("logits"), py::arg("dtype"), py::arg("row_stride"), py::arg("rows"), py::arg("columns"),
        py::arg("out"), py::arg("stream"));
}

}  // namespace quarot
