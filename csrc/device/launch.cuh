// Launching with programmatic dependent launch (PDL) where the GPU has it.
//
// Every kernel launched through here calls pdl_wait() in every thread before it writes global memory or reads what a
// kernel may have written, and pdl_trigger() once its successor may start. Then the successor's launch latency and prologue
// hide behind the tail of its predecessor (about 1 us a launch in a CUDA graph), and correctness does not depend on what the
// predecessor is: griddepcontrol.wait returns only when all of its memory is visible, triggered early or not.
//
// What is read before the wait: weights, their scales, biases and signs, which no kernel writes that triggers early; and in
// decode attention whole stages of old tokens, with the length and the page ids, and in the experts' GEMM the experts of its
// rows, which are looked up again behind it.
#pragma once

#include <cuda_runtime.h>

#include "device/runtime.h"

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

// A grid, in clusters of `cluster` CTAs along x where that is more than one (Hopper).
struct Grid {
    dim3 size;
    unsigned cluster;

    Grid(dim3 size, int cluster = 1) : size(size), cluster(static_cast<unsigned>(cluster)) {}
};

// Launches with PDL where the device has it; more than 48 KB of shared memory is asked for first.
template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), Grid grid, dim3 block, std::size_t shared_bytes, cudaStream_t stream,
                   Args... args) {
    const cudaError_t status = allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
    if (status != cudaSuccess) return status;
    cudaLaunchAttribute attributes[2]{};
    cudaLaunchConfig_t config{};
    config.gridDim = grid.size;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (current_device().capability >= 90) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (grid.cluster > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {grid.cluster, 1, 1};
    }
    return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

}  // namespace quarot
