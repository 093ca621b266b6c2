// Element types that cross the Python boundary as small integers.
#pragma once

namespace quarot {

enum class DType : int { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };

}  // namespace quarot
