#include "hadamard/sm90/launch.cuh"
#include "hadamard/sm90/shapes.h"

namespace quarot::sm90 {
template cudaError_t launch_shape<Shape<128, 2, 1, 2, 64>>(const TransformArgs&, bool, bool, bool, cudaStream_t);
}
