// Binds csrc/gemm: pointers and the stream arrive as integers, a failed launch becomes a RuntimeError.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "bindings/binding.h"
#include "gemm/gemm.h"
#include "gemm/prologue.h"
#include "gemm/sm80/kernels.h"

namespace quarot {
namespace {

// Kernel and its parameters as Python sees them: [kernel, a, b, c]; empty means "choose by size".
using Tactic = std::vector<int>;

GemmChoice resolve(const GemmCall& call, const Tactic& tactic) {
    if (tactic.empty()) return gemm_choice(call);
    if (tactic.size() != 4)
        throw std::invalid_argument("gemm: a tactic is [kernel, a, b, c] (csrc/gemm/dispatch.h) or empty");
    return {static_cast<GemmKernel>(tactic[0]), tactic[1], tactic[2], tactic[3]};
}

GemmCall sized(int m, int n, int k, int ldd, int groups, int out_type, int weight_format, bool packed) {
    GemmCall call{};
    call.problem.m = m;
    call.problem.n = n;
    call.problem.k = k;
    call.problem.ldd = ldd;
    call.problem.groups = groups;
    call.problem.group_size = groups > 0 ? k / groups : 0;
    call.problem.type = static_cast<OutputType>(out_type);
    call.problem.format = static_cast<WeightFormat>(weight_format);
    call.packed_activations = packed;
    return call;
}

// The part of a call that does not depend on where the activation codes come from: int4 tiles, a scale a channel.
// (weight, weight_scale, bias, out, m, n, padded k, out_type, rows added to the output or 0, their stride).
using Linear = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, int, int, int, int,
                          std::uintptr_t, std::int64_t>;

SkinnyProblem prologue_problem(const Linear& linear, std::uintptr_t stream) {
    const auto [weight, weight_scale, bias, out, m, n, k, out_type, added, added_stride] = linear;
    return {nullptr, nullptr, pointer(weight), pointer<float>(weight_scale), pointer<float>(bias), pointer(out), m, n, k, n,
            0, 0, static_cast<OutputType>(out_type), WeightFormat::kInt4Tiles, pointer<CUstream_st>(stream),
            pointer(added), added_stride};
}

void check_prologue(cudaError_t status, const char* op, const SkinnyProblem& p) {
    check(status, op, {{"m", p.m}, {"n", p.n}, {"k", p.k}});
}

}  // namespace

void bind_gemm(pybind11::module_& m) {
    namespace py = pybind11;
    m.def(
        "gemm",
        [](std::uintptr_t codes, std::uintptr_t row_scale, std::uintptr_t weight, std::uintptr_t weight_scale,
           std::uintptr_t bias, std::uintptr_t out, int rows, int n, int k, int ldd, int groups, int out_type,
           int weight_format, bool packed, std::uintptr_t workspace, std::size_t workspace_bytes,
           std::uintptr_t counters, int readable_rows, const Tactic& tactic, std::uintptr_t stream) {
            GemmCall call{{pointer(codes), pointer<float>(row_scale), pointer(weight), pointer<float>(weight_scale),
                           pointer<float>(bias), pointer(out), rows, n, k, ldd, groups, groups > 0 ? k / groups : 0,
                           static_cast<OutputType>(out_type), static_cast<WeightFormat>(weight_format),
                           pointer<CUstream_st>(stream)},
                          packed,
                          pointer(workspace),
                          workspace_bytes,
                          readable_rows,
                          pointer<unsigned>(counters)};
            check(gemm(call, resolve(call, tactic)), "gemm", {{"m", rows}, {"n", n}, {"k", k}, {"groups", groups}});
        },
        py::arg("codes"), py::arg("row_scale"), py::arg("weight"), py::arg("weight_scale"), py::arg("bias"),
        py::arg("out"), py::arg("m"), py::arg("n"), py::arg("k"), py::arg("ldd"), py::arg("groups"),
        py::arg("out_type"), py::arg("weight_format"), py::arg("packed"), py::arg("workspace"),
        py::arg("workspace_bytes"), py::arg("counters"), py::arg("readable_rows"), py::arg("tactic"), py::arg("stream"),
        "Integer GEMM; see csrc/gemm/gemm.h. weight_format: 0 int4 tiles, 1 int8 rows (row-major int4 if packed).");
    m.def(
        "add_rms_norm_gemm",
        [](std::uintptr_t x, std::int64_t x_stride, std::uintptr_t residual, std::int64_t residual_stride, int dtype,
           int k, float eps, float clip_over_qmax, int bits, std::uintptr_t sum, const Linear& linear,
           std::uintptr_t stream) {
            const SkinnyProblem problem = prologue_problem(linear, stream);
            const NormInput input{pointer(x), pointer(residual), x_stride, residual_stride, static_cast<DType>(dtype),
                                  k, eps, clip_over_qmax, bits, pointer(sum)};
            check_prologue(add_rms_norm_gemm(problem, input), "add_rms_norm_gemm", problem);
        },
        py::arg("x"), py::arg("x_stride"), py::arg("residual"), py::arg("residual_stride"), py::arg("dtype"),
        py::arg("k"), py::arg("eps"), py::arg("clip_over_qmax"), py::arg("bits"), py::arg("sum"), py::arg("linear"),
        py::arg("stream"), "See csrc/gemm/prologue.h.");
    m.def(
        "hadamard_gemm",
        [](std::uintptr_t x, std::int64_t row_stride, int dtype, int heads, int head_dim, std::uintptr_t signs,
           float clip_over_qmax, int bits, const Linear& linear, std::uintptr_t stream) {
            const SkinnyProblem problem = prologue_problem(linear, stream);
            const HeadsInput input{pointer(x), static_cast<DType>(dtype), row_stride, problem.m, heads, head_dim,
                                   pointer<const std::uint32_t>(signs)};
            check_prologue(heads_gemm(problem, input, clip_over_qmax, bits), "hadamard_gemm", problem);
        },
        py::arg("x"), py::arg("row_stride"), py::arg("dtype"), py::arg("heads"), py::arg("head_dim"), py::arg("signs"),
        py::arg("clip_over_qmax"), py::arg("bits"), py::arg("linear"), py::arg("stream"));
    m.def("hadamard_gemm_rows", heads_gemm_rows, py::arg("heads"), py::arg("head_dim"), py::arg("shared_bytes"),
          "Most rows of hadamard_gemm where a block can have so many bytes of shared memory.");
    m.def(
        "silu_gemm_sm90",
        [](std::uintptr_t gate_up, bool bfloat16, int order, std::uintptr_t signs, float clip_over_qmax, int bits,
           const Linear& linear, std::uintptr_t stream) {
            const SkinnyProblem problem = prologue_problem(linear, stream);
            const SiluInput input{pointer(gate_up), bfloat16, order, pointer<const std::uint8_t>(signs), clip_over_qmax,
                                  bits};
            check_prologue(sm90::silu_gemm(problem, input), "silu_gemm_sm90", problem);
        },
        py::arg("gate_up"), py::arg("bfloat16"), py::arg("order"), py::arg("signs"), py::arg("clip_over_qmax"),
        py::arg("bits"), py::arg("linear"), py::arg("stream"));
    m.def(
        "gemm_choice",
        [](int rows, int n, int k, int ldd, int groups, int out_type, int weight_format, bool packed) {
            GemmChoice const c = gemm_choice(sized(rows, n, k, ldd, groups, out_type, weight_format, packed));
            return Tactic{static_cast<int>(c.kernel), c.a, c.b, c.c};
        },
        py::arg("m"), py::arg("n"), py::arg("k"), py::arg("ldd"), py::arg("groups"), py::arg("out_type"),
        py::arg("weight_format"), py::arg("packed"),
        "The tactic [kernel, a, b, c] that gemm() takes by itself for this size on the current device.");
    m.def(
        "gemm_scratch",
        [](int rows, int n, int k, int ldd, int groups, int out_type, int weight_format, bool packed,
           const Tactic& tactic) {
            GemmCall const call = sized(rows, n, k, ldd, groups, out_type, weight_format, packed);
            GemmScratch const scratch = gemm_scratch(call, resolve(call, tactic));
            return std::pair(scratch.bytes, scratch.counters);
        },
        py::arg("m"), py::arg("n"), py::arg("k"), py::arg("ldd"), py::arg("groups"), py::arg("out_type"),
        py::arg("weight_format"), py::arg("packed"), py::arg("tactic"), "What gemm() needs beside its operands: (bytes, zeroed 32-bit counters).");
    m.def(
        "int4_code_versions",
        [] {
            sm80::CodeVersions versions;
            check(sm80::w4a4_code_versions(versions), "gemm");
            return std::pair(versions.ptx, versions.binary);
        },
        "(PTX, machine code) of the INT4 tensor-core kernels on the current device, as ten times the architecture.");
}

}  // namespace quarot
