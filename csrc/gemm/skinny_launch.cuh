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

template <class Kernel>
cudaError_t launch(Kernel kernel, void** arguments, dim3 grid, int threads, int shared_bytes, int cluster, bool hopper,
                   cudaStream_t stream) {
    if (shared_bytes > 48 * 1024) {
        cudaError_t const error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
        if (error != cudaSuccess) return error;
    }
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t launch_config{};
    launch_config.gridDim = grid;
    launch_config.blockDim = dim3(threads);
    launch_config.dynamicSmemBytes = shared_bytes;
    launch_config.stream = stream;
    launch_config.attrs = attributes;
    if (hopper) {  // start while the previous kernel drains; the kernel itself waits before it touches activations
        attributes[launch_config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[launch_config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        attributes[launch_config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[launch_config.numAttrs].val.clusterDim.x = cluster;
        attributes[launch_config.numAttrs].val.clusterDim.y = 1;
        attributes[launch_config.numAttrs++].val.clusterDim.z = 1;
    }
    return cudaLaunchKernelExC(&launch_config, reinterpret_cast<void const*>(kernel), arguments);
}

template <class Weights, int TOKEN_TILES, int UNITS, int WARPS, int BLOCKS>
cudaError_t run(SkinnyProblem const& p, int cluster) {
    using Layout = SharedLayout<Weights, TOKEN_TILES, UNITS>;
    int device = 0;
    cudaError_t const error = cudaGetDevice(&device);
    if (error != cudaSuccess) return error;
    DeviceLimits const& limits = device_limits(device);
    bool const hopper = limits.capability >= 90;
    if (!hopper) cluster = 1;

    Geometry g;
    int const strips = (p.n + 15) / 16;
    g.units = (p.k + kUnit - 1) / kUnit;
    g.splits = std::max(1, std::min({cluster, 8, g.units}));
    while (g.splits & (g.splits - 1)) --g.splits;
    g.split_shift = g.splits >= 8 ? 3 : g.splits >= 4 ? 2 : g.splits >= 2 ? 1 : 0;
    int const budget = std::min(limits.shared_per_block, limits.shared_per_sm / BLOCKS - 1024);
    int owners = std::min(strips, std::max(1, limits.sm_count * BLOCKS / g.splits));
    // More owners than fit at once, where the sums of a block's strips do not fit in shared memory, run as further
    // waves.
    while (owners < strips && Layout::total(WARPS, (strips + owners - 1) / owners) > budget)
        owners = std::min(strips, 2 * owners);
    g.strips_max = (strips + owners - 1) / owners;
    g.strip_step = ((uint64_t(strips) << 32) + owners - 1) / owners;
    dim3 const grid(owners * g.splits, (p.m + Layout::kTokens - 1) / Layout::kTokens);
    SkinnyProblem problem = p;
    void* arguments[] = {&problem, &g};
    return launch(skinny_kernel<Weights, TOKEN_TILES, UNITS, WARPS, BLOCKS>, arguments, grid, WARPS * 32,
                  Layout::total(WARPS, g.strips_max), g.splits, hopper, p.stream);
}

}  // namespace quarot::skinny
