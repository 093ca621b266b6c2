// wgmma as in wgmma.cuh, with A in shared memory as well: 8 x 16-byte core matrices, described like those of B.
#pragma once

#include "hadamard/sm90/wgmma.cuh"

namespace quarot::sm90 {

template <int N>
struct WgmmaShared;

template <>
struct WgmmaShared<48> {
    static __device__ __forceinline__ void run(float (&d)[24], std::uint64_t a, std::uint64_t b, int accumulate) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %26, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
            "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, %24, %25, p, 1, 1, 0, 0; }\n"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
              "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
              "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
            : "l"(a), "l"(b), "r"(accumulate));
    }
};

}  // namespace quarot::sm90
