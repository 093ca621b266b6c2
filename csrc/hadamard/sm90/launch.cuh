// Launching the transform in one of its shapes. Each shape is instantiated in a file of its own (shape_*.cu).
#pragma once

#include <type_traits>

#include "hadamard/sm90/transform.cuh"

namespace quarot::sm90 {

// The shape for a row an SM or fewer, where the latency of a row is what counts: twice the warpgroups for it.
template <class S>
struct FewRows {
    using Shape = S;
};
template <>
struct FewRows<Shape<176, 1, 1, 3, 32>> {
    using Shape = sm90::Shape<176, 1, 2, 1, 64>;
};

template <class S, bool kSilu, bool kCodes, typename Element>
cudaError_t launch_kernel(const TransformArgs& args, cudaStream_t stream) {
    const int processors = current_device().multiprocessors;
    using Few = typename FewRows<S>::Shape;
    if constexpr (kSilu && !std::is_same_v<S, Few>)
        if (args.rows <= processors) return launch_kernel<Few, kSilu, kCodes, Element>(args, stream);
    // A row for each SM or fewer: one group each. The block is then small enough to start, and to fetch its table, beside
    // a GEMM that is still running.
    const int groups = args.rows <= processors ? 1 : S::NG;
    return launch(transform_kernel<S, kSilu, kCodes, Element>, dim3(args.rows < processors ? args.rows : processors),
                  dim3(groups * S::kGroupThreads), S::kTableBytes + groups * (S::kXBytes + S::kRingBytes), stream, args);
}

template <class S>
cudaError_t launch_shape(const TransformArgs& args, bool silu, bool codes, bool bfloat16, cudaStream_t stream) {
    if (silu)
        return bfloat16 ? launch_kernel<S, true, true, __nv_bfloat16>(args, stream)
                        : launch_kernel<S, true, true, __half>(args, stream);
    if (codes)
        return bfloat16 ? launch_kernel<S, false, true, __nv_bfloat16>(args, stream)
                        : launch_kernel<S, false, true, __half>(args, stream);
    return bfloat16 ? launch_kernel<S, false, false, __nv_bfloat16>(args, stream)
                    : launch_kernel<S, false, false, __half>(args, stream);
}

}  // namespace quarot::sm90
