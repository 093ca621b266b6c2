// Where a value is made, when that is not to be left to the compiler.
#pragma once

#include <cstdint>

namespace quarot {

// Keeps the compiler from making it later, behind a wait or a load that it does not depend on.
__device__ __forceinline__ void made_by_now(std::uint32_t& x) { asm volatile("" : "+r"(x)); }
template <typename T>
__device__ __forceinline__ void made_by_now(const T*& p) { asm volatile("" : "+l"(p)); }

}  // namespace quarot
