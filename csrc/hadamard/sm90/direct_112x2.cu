#include "hadamard/sm90/direct.cuh"

namespace quarot::sm90 {
template cudaError_t launch_direct<DirectShape<112, 2, 2, 7, 3, true>>(const TransformArgs&, bool, bool, cudaStream_t);
}
