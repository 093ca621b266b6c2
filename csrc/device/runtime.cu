#include "device/runtime.h"

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

namespace quarot {
namespace {

// Shared memory that needs no permission is 48 KB with what a kernel declares statically, which is less than 8 KB in all of ours.
constexpr std::size_t kAlwaysAllowed = 40 * 1024;

void require(cudaError_t status, const char* what) {
    if (!succeeded(status)) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

}  // namespace

bool succeeded(cudaError_t status) {
    if (status != cudaSuccess) cudaGetLastError();
    return status == cudaSuccess;
}

const Device& current_device() {
    static thread_local Device known;
    int index = 0;
    require(cudaGetDevice(&index), "no current CUDA device");
    if (index == known.index) return known;
    const auto ask = [index](cudaDeviceAttr attribute) {
        int value = 0;
        require(cudaDeviceGetAttribute(&value, attribute, index), "a CUDA device does not say what it is");
        return value;
    };
    Device fresh;
    fresh.capability = 10 * ask(cudaDevAttrComputeCapabilityMajor) + ask(cudaDevAttrComputeCapabilityMinor);
    fresh.multiprocessors = ask(cudaDevAttrMultiProcessorCount);
    fresh.shared_per_block = ask(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    fresh.shared_per_multiprocessor = ask(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    fresh.index = index;
    return known = fresh;
}

cudaError_t allow_shared(const void* kernel, std::size_t bytes) {
    static std::mutex mutex;
    static std::map<std::pair<const void*, int>, std::size_t> allowed;  // of a kernel on a device
    if (bytes <= kAlwaysAllowed) return cudaSuccess;
    const int device = current_device().index;
    const std::lock_guard lock(mutex);
    std::size_t& most = allowed[{kernel, device}];
    if (bytes <= most) return cudaSuccess;
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    if (status == cudaSuccess) most = bytes;
    return status;
}

}  // namespace quarot
