// Tensor maps (what the copy engine needs to know of an array) and copies by them, for kernels without CUTLASS's layers.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>

#include "device/runtime.h"

namespace quarot::sm90 {

struct MapDimension {
    uint64_t size;    ///< elements
    uint64_t stride;  ///< bytes to the next one, a multiple of 16; ignored for the first dimension, which is contiguous
    uint32_t box;     ///< elements of one copy
};

/// Fills `map`. Elements past the end are read as zero and not written. The driver's function is looked up at run time,
/// so nothing links to the driver.
inline cudaError_t make_tensor_map(CUtensorMap& map, CUtensorMapDataType type, void const* data,
                                   std::initializer_list<MapDimension> dimensions, CUtensorMapSwizzle swizzle) {
    static auto const encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found{};
        char const* name = "cuTensorMapEncodeTiled";
#if CUDART_VERSION >= 13000
        bool const asked = succeeded(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found));
#else
        bool const asked = succeeded(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found));
#endif
        return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(asked ? function : nullptr);
    }();
    if (encode == nullptr) return cudaErrorNotSupported;
    cuuint64_t sizes[5], strides[5];
    cuuint32_t boxes[5], steps[5];
    cuuint32_t rank = 0;
    for (MapDimension const& d : dimensions) {
        sizes[rank] = d.size;
        if (rank > 0) strides[rank - 1] = d.stride;
        boxes[rank] = d.box;
        steps[rank++] = 1;
    }
    CUresult const status = encode(&map, type, rank, const_cast<void*>(data), sizes, strides, boxes, steps,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

/// Asks for the map itself, which the first copy would wait for.
__device__ __forceinline__ void prefetch_map(CUtensorMap const& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// A box at (x, y) to shared memory; it counts as its bytes on `barrier`.
__device__ __forceinline__ void load_2d(uint32_t shared, CUtensorMap const& map, int x, int y, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(shared), "l"(&map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void load_3d(uint32_t shared, CUtensorMap const& map, int x, int y, int z,
                                        uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        ::"r"(shared), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
}

/// A box from shared memory, as one bulk group.
__device__ __forceinline__ void store_2d(CUtensorMap const& map, uint32_t shared, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(&map), "r"(x), "r"(y), "r"(shared)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

}  // namespace quarot::sm90
