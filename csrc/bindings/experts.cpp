// Binds csrc/experts: pointers and the stream arrive as integers, a failed launch becomes a RuntimeError.
#include <pybind11/pybind11.h>

#include "bindings/binding.h"
#include "experts/expert_gemm_w4a4.h"
#include "experts/expert_route.h"
#include "experts/expert_sum.h"

namespace quarot {

void bind_experts(pybind11::module_& m) {
    namespace py = pybind11;
    m.def(
        "expert_gemm_w4a4",
        [](std::uintptr_t codes, std::uintptr_t row_scale, std::uintptr_t expert, std::uintptr_t weight,
           std::uintptr_t weight_scale, std::uintptr_t out, int rows, int top_k, int experts, int n, int k, int out_type,
           std::uintptr_t stream) {
            const ExpertProblem problem{pointer(codes), pointer<float>(row_scale), pointer<std::int64_t>(expert),
                                        pointer(weight), pointer<float>(weight_scale), pointer(out), rows, top_k, experts,
                                        n, k, static_cast<OutputType>(out_type), pointer<CUstream_st>(stream)};
            check(expert_gemm_w4a4(problem), "expert_gemm_w4a4",
                  {{"rows", rows}, {"top_k", top_k}, {"experts", experts}, {"n", n}, {"k", k}});
        },
        py::arg("codes"), py::arg("row_scale"), py::arg("expert"), py::arg("weight"), py::arg("weight_scale"),
        py::arg("out"), py::arg("rows"), py::arg("top_k"), py::arg("experts"), py::arg("n"), py::arg("k"),
        py::arg("out_type"), py::arg("stream"));
    m.def(
        "expert_route",
        [](std::uintptr_t logits, int dtype, int rows, int experts, int top_k, bool normalize, std::uintptr_t weight,
           int weight_dtype, std::uintptr_t expert, std::uintptr_t stream) {
            check(expert_route(pointer(logits), static_cast<DType>(dtype), rows, experts, top_k, normalize,
                               pointer(weight), static_cast<DType>(weight_dtype), pointer<std::int64_t>(expert),
                               pointer<CUstream_st>(stream)),
                  "expert_route", {{"rows", rows}, {"experts", experts}, {"top_k", top_k}});
        },
        py::arg("logits"), py::arg("dtype"), py::arg("rows"), py::arg("experts"), py::arg("top_k"),
        py::arg("normalize"), py::arg("weight"), py::arg("weight_dtype"), py::arg("expert"), py::arg("stream"));
    m.def(
        "expert_sum",
        [](std::uintptr_t x, int dtype, std::uintptr_t weight, int weight_dtype, int tokens, int top_k, int n,
           std::uintptr_t out, std::uintptr_t stream) {
            check(expert_sum(pointer(x), static_cast<DType>(dtype), pointer(weight), static_cast<DType>(weight_dtype),
                             tokens, top_k, n, pointer(out), pointer<CUstream_st>(stream)),
                  "expert_sum", {{"tokens", tokens}, {"top_k", top_k}, {"n", n}});
        },
        py::arg("x"), py::arg("dtype"), py::arg("weight"), py::arg("weight_dtype"), py::arg("tokens"), py::arg("top_k"),
        py::arg("n"), py::arg("out"), py::arg("stream"));
}

}  // namespace quarot
