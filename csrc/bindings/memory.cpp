// Binds csrc/memory: out of memory is an answer (False), any other failure a RuntimeError.
#include "memory/growing_buffer.h"

#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

namespace quarot {
namespace {

void check(int status, const char* what, std::size_t bytes) {
    if (status == 0) return;
    throw std::runtime_error(std::string(what) + ": " + driver_error(status) + " (" + std::to_string(bytes) + " bytes)");
}

}  // namespace

void bind_memory(pybind11::module_& m) {
    namespace py = pybind11;
    m.def("mapping_granularity", &mapping_granularity, py::arg("device"),
          "Bytes that device memory can be mapped in steps of; 0 where it cannot.");
    m.def(
        "reserve_addresses",
        [](std::size_t bytes) {
            std::uintptr_t address = 0;
            check(reserve_addresses(bytes, &address), "reserving addresses", bytes);
            return address;
        },
        py::arg("bytes"), "Start of a reserved range of addresses without memory behind it.");
    m.def(
        "map_memory",
        [](int device, std::uintptr_t address, std::size_t offset, std::size_t bytes) {
            const int status = map_memory(device, address, offset, bytes);
            if (status == kOutOfMemory) return false;
            check(status, "mapping memory", bytes);
            return true;
        },
        py::arg("device"), py::arg("address"), py::arg("offset"), py::arg("bytes"),
        "Put memory behind the next bytes of a range; False when the device has no more.");
    m.def(
        "release_addresses",
        [](std::uintptr_t address, std::size_t mapped, std::size_t reserved) {
            check(release_addresses(address, mapped, reserved), "releasing memory", mapped);
        },
        py::arg("address"), py::arg("mapped"), py::arg("reserved"));
}

}  // namespace quarot
