// The driver's virtual memory functions. libcuda is opened at run time: the extension must load where there is no driver.
#include "memory/growing_buffer.h"

#include <cuda.h>
#include <dlfcn.h>

namespace quarot {
namespace {

struct Driver {
    decltype(&cuDeviceGetAttribute) device_attribute;
    decltype(&cuMemGetAllocationGranularity) granularity;
    decltype(&cuMemAddressReserve) reserve;
    decltype(&cuMemAddressFree) free;
    decltype(&cuMemCreate) create;
    decltype(&cuMemMap) map;
    decltype(&cuMemSetAccess) set_access;
    decltype(&cuMemUnmap) unmap;
    decltype(&cuMemRelease) release;
    decltype(&cuGetErrorString) error_string;
    bool complete = false;

    Driver() {
        void* library = dlopen("libcuda.so.1", RTLD_NOW);
        if (library == nullptr) return;
        const auto find = [library](auto& function, const char* name) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
            return function != nullptr;
        };
        complete = find(device_attribute, "cuDeviceGetAttribute") &&
                   find(granularity, "cuMemGetAllocationGranularity") && find(reserve, "cuMemAddressReserve") &&
                   find(free, "cuMemAddressFree") && find(create, "cuMemCreate") && find(map, "cuMemMap") &&
                   find(set_access, "cuMemSetAccess") && find(unmap, "cuMemUnmap") && find(release, "cuMemRelease") &&
                   find(error_string, "cuGetErrorString");
    }
};

const Driver& driver() {
    static const Driver instance;
    return instance;
}

CUmemAllocationProp property(int device) {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    return prop;
}

}  // namespace

std::size_t mapping_granularity(int device) {
    if (!driver().complete) return 0;
    int supported = 0;
    const auto attribute = CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    if (driver().device_attribute(&supported, attribute, device) != CUDA_SUCCESS || !supported) return 0;
    const CUmemAllocationProp prop = property(device);
    std::size_t step = 0;
    const auto option = CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
    return driver().granularity(&step, &prop, option) == CUDA_SUCCESS ? step : 0;
}

int reserve_addresses(std::size_t bytes, std::uintptr_t* address) {
    CUdeviceptr pointer = 0;
    const CUresult status = driver().reserve(&pointer, bytes, 0, 0, 0);
    *address = static_cast<std::uintptr_t>(pointer);
    return status;
}

int map_memory(int device, std::uintptr_t address, std::size_t offset, std::size_t bytes) {
    const CUmemAllocationProp prop = property(device);
    CUmemGenericAllocationHandle handle{};
    CUresult status = driver().create(&handle, bytes, &prop, 0);
    if (status != CUDA_SUCCESS) return status;
    status = driver().map(address + offset, bytes, 0, handle, 0);
    driver().release(handle);  // the mapping keeps the memory
    if (status != CUDA_SUCCESS) return status;
    CUmemAccessDesc access{};
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    status = driver().set_access(address + offset, bytes, &access, 1);
    if (status != CUDA_SUCCESS) driver().unmap(address + offset, bytes);
    return status;
}

int release_addresses(std::uintptr_t address, std::size_t mapped, std::size_t reserved) {
    const CUresult status = mapped ? driver().unmap(address, mapped) : CUDA_SUCCESS;
    return status != CUDA_SUCCESS ? status : driver().free(address, reserved);
}

const char* driver_error(int status) {
    const char* text = nullptr;
    if (driver().complete) driver().error_string(static_cast<CUresult>(status), &text);
    return text ? text : "unknown driver error";
}

}  // namespace quarot
