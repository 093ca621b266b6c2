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
    cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
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
  int device = 0;
  cudaError_t const error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  DeviceLimits const& limits = device_limits(device);
  bool const hopper = limits.capability >= 90;
  if (!hopper) cluster = 1;

  constexpr int kTokens = TOKEN_TILES * 8;
  Geometry g;
  int const strips = (p.n + 15) / 16;
  g.units = (p.k + kUnit - 1) / kUnit;
  g.splits = std::min(cluster, g.units);
  while (g.splits & (g.splits - 1)) --g.splits;
  g.split_shift = g.splits >= 8 ? 3 : g.splits >= 4 ? 2 : g.splits >= 2 ? 1 : 0;
  int const budget = std::min(limits.shared_per_block, limits.shared_per_sm / BLOCKS - 1024);
  int owners = std::min(strips, std::max(1, limits.sm_count * BLOCKS / g.splits));
  int const acc_strip_bytes = kTokens * kAccStride * 4;
  int const token_rows = std::min(kTokens, p.m);
  // Leave at least half of the shared memory to the activations; more owners than fit at once then run as further waves.
  int const strips_limit = std::max(1, budget / 2 / acc_strip_bytes);
  owners = std::max(owners, (strips + strips_limit - 1) / strips_limit);
  g.strips_max = (strips + owners - 1) / owners;
  g.strip_step = ((uint64_t(strips) << 32) + owners - 1) / owners;
  int const slack = UNITS * kUnit;  // the last chunk of the last row may read (and ignore) this much more
  int const left = budget - g.strips_max * acc_strip_bytes - slack;
  int const split_units = (g.units + g.splits - 1) / g.splits;
  g.phase_units = split_units;
  while (token_rows * Weights::kRowPad(g.phase_units * kUnit) > left) g.phase_units = (g.phase_units + 1) / 2;
  if (g.phase_units < split_units) g.phase_units = std::max(UNITS, g.phase_units / UNITS * UNITS);
  g.row_bytes = Weights::kRowPad(g.phase_units * kUnit);
  int const shared_bytes = g.strips_max * acc_strip_bytes + token_rows * g.row_bytes + slack;
  dim3 const grid(owners * g.splits, (p.m + kTokens - 1) / kTokens);
  SkinnyProblem problem = p;
  void* arguments[] = {&problem, &g};
  return launch(skinny_kernel<Weights, TOKEN_TILES, UNITS, WARPS, BLOCKS>, arguments, grid, WARPS * 32, shared_bytes, g.splits, hopper,
                p.stream);
}

}  // namespace quarot::skinny
