// Host side of the few-token kernel: launch geometry, shared-memory budget, launch attributes.
#pragma once

#include "gemm/skinny_kernel.cuh"

#include <algorithm>
#include <atomic>

namespace quarot::skinny {

struct DeviceLimits {
    int sm_count = 0;
    int shared_per_block = 0;
    int shared_per_sm = 0;
    int capability = 0;
};

inline DeviceLimits const& device_limits(int device) {
    static DeviceLimits limits[64];
    static std::atomic<bool> known[64];
    DeviceLimits& d = limits[device];
    if (!known[device].load(std::memory_order_acquire)) {
        DeviceLimits fresh;
        int major = 0, minor = 0;
        cudaDeviceGetAttribute(&fresh.sm_count, cudaDevAttrMultiProcessorCount, device);
        cudaDeviceGetAttribute(&fresh.shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
        cudaDeviceGetAttribute(&fresh.shared_per_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
        fresh.capability = 10 * major + minor;
        d = fresh;  // every thread writes the same values
        known[device].store(true, std::memory_order_release);
    }
    return d;
}

/// On Hopper the kernel may start while the previous one drains; it waits itself before it touches activations.
template <class Kernel>
cudaError_t launch(Kernel kernel, void** arguments, dim3 grid, int threads, int shared_bytes, bool hopper,
                   cudaStream_t stream) {
    if (shared_bytes > 48 * 1024) {
        cudaError_t const error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return error;
    }
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &early;
    config.numAttrs = hopper ? 1 : 0;
    return cudaLaunchKernelExC(&config, reinterpret_cast<void const*>(kernel), arguments);
}

/// `input_shared`: bytes of shared memory that a made input needs beside its codes.
template <class Weights, class Input, int TOKEN_TILES, int UNITS, int WARPS, int BLOCKS>
cudaError_t run(SkinnyProblem const& p, typename Input::Arguments const& input, int input_shared) {
    using Layout = SharedLayout<Weights, TOKEN_TILES, UNITS>;
    int device = 0;
    cudaError_t const error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    DeviceLimits const& limits = device_limits(device);

    Geometry g;
    g.units = (p.k + kUnit - 1) / kUnit;
    int const strips = (p.n + 15) / 16;
    int const budget = std::min(limits.shared_per_block, limits.shared_per_sm / BLOCKS - 1024) - input_shared;
    int blocks = std::min(strips, limits.sm_count * BLOCKS);
    // Where the sums of a block's strips do not fit in shared memory, more blocks run as further waves.
    while (blocks < strips && Layout::total(WARPS, (strips + blocks - 1) / blocks) > budget)
        blocks = std::min(strips, 2 * blocks);
    g.strips_max = (strips + blocks - 1) / blocks;
    g.strip_step = ((uint64_t(strips) << 32) + blocks - 1) / blocks;
    dim3 const grid(blocks, (p.m + Layout::kTokens - 1) / Layout::kTokens);
    if (Input::kMade && grid.y > 1) return cudaErrorInvalidValue;
    if (Input::kOneChunk && g.units > WARPS * UNITS) return cudaErrorInvalidValue;
    SkinnyProblem problem = p;
    typename Input::Arguments made = input;
    void* arguments[] = {&problem, &made, &g};
    return launch(skinny_kernel<Weights, Input, TOKEN_TILES, UNITS, WARPS, BLOCKS>, arguments, grid, WARPS * 32,
                  Layout::total(WARPS, g.strips_max) + input_shared, limits.capability >= 90, p.stream);
}

template <class Weights, int TOKEN_TILES, int UNITS, int WARPS, int BLOCKS>
cudaError_t run(SkinnyProblem const& p) {
    return run<Weights, StoredCodes, TOKEN_TILES, UNITS, WARPS, BLOCKS>(p, {}, 0);
}

}  // namespace quarot::skinny
