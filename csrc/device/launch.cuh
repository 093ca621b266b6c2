// Launching with programmatic dependent launch (PDL) where the GPU has it.
//
// Every kernel launched through here calls pdl_wait() in every thread before it writes global memory or reads what a
// kernel may have written, and pdl_trigger() once its successor may start. Then the successor's launch latency and prologue
// hide behind the tail of its predecessor (about 1 us a launch in a CUDA graph), and correctness does not depend on what the
// predecessor is: griddepcontrol.wait returns only when all of its memory is visible, triggered early or not.
//
// What is read before the wait: weights, their scales, biases and signs, which no kernel writes that triggers early; and in
// decode attention whole stages of old tokens, with the length and the page ids, which are looked up again behind it.
#pragma once

#include <cuda_runtime.h>

namespace quarot {

__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Compute capability as 10 * major + minor of the current device.
inline int device_capability() {
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    return 10 * major + minor;
}

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream,
                   Args... args) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = device_capability() >= 90 ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

}  // namespace quarot
