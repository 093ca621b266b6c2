// What launchers ask of the CUDA runtime, on the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace quarot {

struct Device {
    int index = -1;
    int capability = 0;  // 10 * major + minor
    int multiprocessors = 0;
    int shared_per_block = 0, shared_per_multiprocessor = 0;  // bytes, at most
};

// The current device, looked up once a thread and change of device.
//
// Throws std::runtime_error where the runtime names none.
const Device& current_device();

// Whether a call of the runtime went well. The runtime keeps an error until somebody asks for it, and whoever asks how his own
// launch went (<<<>>> and CUTLASS do) would be told of this one: an error that no caller is told of is forgotten here.
bool succeeded(cudaError_t status);

// Lets a kernel have so much dynamic shared memory on the current device. Never less than it was let before: another thread
// may be about to launch it with more.
cudaError_t allow_shared(const void* kernel, std::size_t bytes);

}  // namespace quarot
