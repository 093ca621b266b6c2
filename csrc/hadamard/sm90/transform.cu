// Choice among the compiled shapes of the tensor-core transform.
#include "hadamard/sm90/transform.h"

#include <cmath>

#include "device/runtime.h"
#include "hadamard/sm90/direct_shapes.h"
#include "hadamard/sm90/shapes.h"

namespace quarot::sm90 {

template <class S>
cudaError_t launch_shape(const TransformArgs& args, bool silu, bool codes, bool bfloat16, cudaStream_t stream);

template <class S>
cudaError_t launch_direct(const TransformArgs& args, bool silu, bool bfloat16, cudaStream_t stream);

// The fewest tiles whose padded m is at most 128, since fewer tiles mean more rows in flight on an SM (8192 as 128 x 64
// is faster than as 64 x 128, 14336 as 112 x 128 than as 56 x 256); beyond that the least matrix work.
TransformPlan plan_transform(std::int64_t order, std::int64_t pow2) {
    TransformPlan best{0, 0, 0};
    double best_work = INFINITY;
    const auto consider = [&](int padded_m, int tiles) {
        if (pow2 % (64 * tiles) != 0) return;
        const std::int64_t m = order * pow2 / (64 * tiles);
        const double work = padded_m <= 128 ? tiles + padded_m / 1024.0 : tiles * padded_m * padded_m;
        if (m % 4 != 0 || m > padded_m || work >= best_work) return;
        best = {static_cast<int>(m), padded_m, tiles};
        best_work = work;
    };
#define CONSIDER(MP, T, NS, NG, RING_KB) consider(MP, T);
    QUAROT_TRANSFORM_SHAPES(CONSIDER)
#undef CONSIDER
    return best;
}

cudaError_t launch_transform(const TransformPlan& plan, TransformArgs args, bool silu, bool codes, bool bfloat16,
                             cudaStream_t stream) {
    args.m = plan.m;
    args.n = plan.m * plan.tiles * 64;
    const bool upper = args.layout == CodeLayout::kUpperHalves;
    args.shift = upper ? 4 : 0, args.mask = upper ? 0xf0f0f0f0u : ~0u;
    args.norm = static_cast<float>((plan.tiles == 1 ? 8.0 : 16.0) / std::sqrt(static_cast<double>(args.n)));
    // From four rows an SM on: below, whole rows fill the ring too late.
    if (codes && args.rows > 4 * current_device().multiprocessors) {
#define LAUNCH(MP, T, NG, SLOTS, UPS, STAGED)   \
    if (plan.padded_m == MP && plan.tiles == T) \
        return launch_direct<DirectShape<MP, T, NG, SLOTS, UPS, STAGED>>(args, silu, bfloat16, stream);
        QUAROT_DIRECT_SHAPES(LAUNCH)
#undef LAUNCH
    }
#define LAUNCH(MP, T, NS, NG, RING_KB)          \
    if (plan.padded_m == MP && plan.tiles == T) \
        return launch_shape<Shape<MP, T, NS, NG, RING_KB>>(args, silu, codes, bfloat16, stream);
    QUAROT_TRANSFORM_SHAPES(LAUNCH)
#undef LAUNCH
    return cudaErrorInvalidValue;
}

}  // namespace quarot::sm90
