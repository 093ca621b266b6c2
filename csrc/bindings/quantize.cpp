// Binds csrc/quantize: pointers and the stream arrive as integers, a failed launch becomes a RuntimeError.
#include <pybind11/pybind11.h>

#include "bindings/binding.h"
#include "quantize/add_rms_norm_quantize.h"
#include "quantize/quantize_per_token.h"

namespace quarot {
namespace {

void check_rows(cudaError_t status, const char* op, std::int64_t rows, std::int64_t k, int bits) {
    check(status, op, {{"rows", rows}, {"k", k}, {"bits", bits}});
}

}  // namespace

void bind_quantize(pybind11::module_& m) {
    namespace py = pybind11;
    m.def(
        "quantize_per_token",
        [](std::uintptr_t x, int dtype, std::int64_t row_stride, std::int64_t rows, std::int64_t k,
           std::uintptr_t codes, std::uintptr_t scale, float clip_over_qmax, int bits, int layout,
           std::uintptr_t stream) {
            check_rows(quantize_per_token(pointer(x), static_cast<DType>(dtype), row_stride, rows, k, pointer(codes),
                                     pointer<float>(scale), clip_over_qmax, bits, static_cast<CodeLayout>(layout),
                                     pointer<CUstream_st>(stream)),
                  "quantize_per_token", rows, k, bits);
        },
        py::arg("x"), py::arg("dtype"), py::arg("row_stride"), py::arg("rows"), py::arg("k"), py::arg("codes"),
        py::arg("scale"), py::arg("clip_over_qmax"), py::arg("bits"), py::arg("layout"), py::arg("stream"));
    m.def(
        "add_rms_norm_quantize",
        [](std::uintptr_t x, std::int64_t x_stride, std::uintptr_t residual, std::int64_t residual_stride, int dtype,
           std::int64_t rows, std::int64_t k, float eps, std::uintptr_t codes, std::uintptr_t scale,
           std::uintptr_t sum, float clip_over_qmax, int bits, int layout, std::uintptr_t stream) {
            check_rows(add_rms_norm_quantize(pointer(x), x_stride, pointer(residual), residual_stride,
                                        static_cast<DType>(dtype), rows, k, eps, pointer(codes), pointer<float>(scale),
                                        pointer(sum), clip_over_qmax, bits, static_cast<CodeLayout>(layout),
                                        pointer<CUstream_st>(stream)),
                  "add_rms_norm_quantize", rows, k, bits);
        },
        py::arg("x"), py::arg("x_stride"), py::arg("residual"), py::arg("residual_stride"), py::arg("dtype"),
        py::arg("rows"), py::arg("k"), py::arg("eps"), py::arg("codes"), py::arg("scale"), py::arg("sum"),
        py::arg("clip_over_qmax"), py::arg("bits"), py::arg("layout"), py::arg("stream"));
    m.def(
        "add_rms_norm",
        [](std::uintptr_t x, std::int64_t x_stride, std::uintptr_t residual, std::int64_t residual_stride, int dtype,
           std::int64_t rows, std::int64_t k, float eps, std::uintptr_t out, std::uintptr_t stream) {
            check_rows(add_rms_norm(pointer(x), x_stride, pointer(residual), residual_stride, static_cast<DType>(dtype),
                               rows, k, eps, pointer(out), pointer<CUstream_st>(stream)),
                  "add_rms_norm", rows, k, 16);
        },
        py::arg("x"), py::arg("x_stride"), py::arg("residual"), py::arg("residual_stride"), py::arg("dtype"),
        py::arg("rows"), py::arg("k"), py::arg("eps"), py::arg("out"), py::arg("stream"));
}

}  // namespace quarot
