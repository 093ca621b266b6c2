// spills: two words a row, around the poll of a flag
#include "hadamard/sm90/direct.cuh"

namespace quarot::sm90 {
template cudaError_t launch_direct<DirectShape<176, 1, 3, 7, 3, false>>(const TransformArgs&, bool, bool, cudaStream_t);
}
