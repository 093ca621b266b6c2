// What every file here needs: pointers from integers, exceptions from error codes.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

#include "device/runtime.h"

namespace quarot {

template <typename T = void>
T* pointer(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Throws std::runtime_error unless a launch went well, naming the op, the error and the sizes it came with.
inline void check(cudaError_t status, const char* op,
                  std::initializer_list<std::pair<const char*, std::int64_t>> sizes = {}) {
    if (succeeded(status)) return;
    std::string message = std::string(op) + ": " + cudaGetErrorString(status);
    const char* separator = " (";
    for (const auto& [name, value] : sizes) {
        message += separator + std::string(name) + "=" + std::to_string(value);
        separator = ", ";
    }
    throw std::runtime_error(sizes.size() ? message + ")" : message);
}

}  // namespace quarot
