// Device memory that grows without moving: a reserved range of addresses, backed by memory as it is needed.
// Used by quarot/nn/growing_buffer.py. Functions return the driver's error code, 0 for success.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quarot {

constexpr int kOutOfMemory = 2;  // CUDA_ERROR_OUT_OF_MEMORY

// Step in bytes that memory on `device` can be mapped in; 0 where the driver or the device cannot.
std::size_t mapping_granularity(int device);

int reserve_addresses(std::size_t bytes, std::uintptr_t* address);

// Backs `bytes` behind the `offset` bytes that are backed already; both are multiples of the granularity.
int map_memory(int device, std::uintptr_t address, std::size_t offset, std::size_t bytes);

// Gives back the memory (the first `mapped` bytes) and the addresses. Nothing on the device may still use it.
int release_addresses(std::uintptr_t address, std::size_t mapped, std::size_t reserved);

const char* driver_error(int status);

}  // namespace quarot
