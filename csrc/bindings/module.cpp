// The Python module quarot._C: one bind function per concept, each in its own file beside this one.
//
// The build defines QUAROT_CONCEPTS from the files present, e.g. BIND(gemm) BIND(quantize): adding csrc/bindings/x.cpp
// with bind_x is all it takes. QUAROT_ARCHITECTURES and QUAROT_PTX_ARCHITECTURES are lists such as ITEM(80) ITEM(90).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#define BIND(stem) void bind_##stem(pybind11::module_& m);
namespace quarot {
QUAROT_CONCEPTS
}
#undef BIND

#define ITEM(number) number,

PYBIND11_MODULE(_C, m) {
    m.doc() = "CUDA kernels of quarot. Pointers and the stream are integers; use torch.ops.quarot, not this module.";
    m.def("architectures", [] { return std::vector<int>{QUAROT_ARCHITECTURES}; },
          "Compute capabilities (times ten) with machine code for the kernels that serve every GPU.");
    m.def("ptx_architectures", [] { return std::vector<int>{QUAROT_PTX_ARCHITECTURES}; },
          "Compute capabilities (times ten) with PTX, which the driver compiles for newer GPUs.");
#define BIND(stem) quarot::bind_##stem(m);
    QUAROT_CONCEPTS
#undef BIND
}
