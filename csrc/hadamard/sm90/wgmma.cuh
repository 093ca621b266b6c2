// wgmma with A in registers and B (K-major, no swizzle) in shared memory, fp16 in, fp32 accumulate, one k16 step.
//
// D [64, N] (+)= A [64, 16] B [16, N]. Lane (g = lane / 4, c = lane % 4) of warp w holds of A rows 16w + g and
// 16w + g + 8, columns 2c, 2c+1, 2c+8, 2c+9, and of D the same rows, columns 8j + 2c and 8j + 2c + 1 in
// d[4j .. 4j+3] = (g, 2c), (g, 2c+1), (g+8, 2c), (g+8, 2c+1).
#pragma once

#include <cstdint>

namespace quarot::sm90 {

// Descriptor of B without swizzle: 8 x 16-byte core matrices, contiguous (128 B); `k_bytes` between the two along K,
// 128 bytes between neighbours along N.
__device__ __forceinline__ std::uint64_t b_descriptor(std::uint32_t shared_address, std::uint32_t k_bytes) {
    return static_cast<std::uint64_t>(shared_address >> 4) | static_cast<std::uint64_t>(k_bytes >> 4) << 16 |
           static_cast<std::uint64_t>(128 >> 4) << 32;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

template <int N>
struct Wgmma;

#define QUAROT_F8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
// P: number of the predicate register's source, A0..A3, B: operand numbers after the N / 2 accumulators.
#define QUAROT_WGMMA(N, REGISTERS, A0, A1, A2, A3, B, P, ...) \
    template <> \
    struct Wgmma<N> { \
        static __device__ __forceinline__ void run(float (&d)[N / 2], const std::uint32_t (&a)[4], std::uint64_t b, \
                                                   int accumulate) { \
            asm volatile( \
                "{ .reg .pred p; setp.ne.b32 p, %" #P ", 0;\n" \
                "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGISTERS "}, {%" #A0 ", %" #A1 ", %" #A2 \
                ", %" #A3 "}, %" #B ", p, 1, 1, 0; }\n" \
                : __VA_ARGS__ \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate)); \
        } \
    };

#define QUAROT_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define QUAROT_R8 "%8, %9, %10, %11, %12, %13, %14, %15"
#define QUAROT_R16 "%16, %17, %18, %19, %20, %21, %22, %23"
#define QUAROT_R24 "%24, %25, %26, %27, %28, %29, %30, %31"
#define QUAROT_R32 "%32, %33, %34, %35, %36, %37, %38, %39"
#define QUAROT_R40 "%40, %41, %42, %43, %44, %45, %46, %47"
#define QUAROT_R48 "%48, %49, %50, %51, %52, %53, %54, %55"
#define QUAROT_R56 "%56, %57, %58, %59, %60, %61, %62, %63"
#define QUAROT_R64 "%64, %65, %66, %67, %68, %69, %70, %71"
#define QUAROT_R72 "%72, %73, %74, %75, %76, %77, %78, %79"
#define QUAROT_R80 "%80, %81, %82, %83, %84, %85, %86, %87"
QUAROT_WGMMA(32, QUAROT_R0 ", " QUAROT_R8, 16, 17, 18, 19, 20, 21,
             QUAROT_F8(0), QUAROT_F8(8))
QUAROT_WGMMA(64, QUAROT_R0 ", " QUAROT_R8 ", " QUAROT_R16 ", " QUAROT_R24, 32, 33, 34, 35, 36, 37,
             QUAROT_F8(0), QUAROT_F8(8), QUAROT_F8(16), QUAROT_F8(24))
QUAROT_WGMMA(80, QUAROT_R0 ", " QUAROT_R8 ", " QUAROT_R16 ", " QUAROT_R24 ", " QUAROT_R32, 40, 41, 42, 43, 44, 45,
             QUAROT_F8(0), QUAROT_F8(8), QUAROT_F8(16), QUAROT_F8(24), QUAROT_F8(32))
QUAROT_WGMMA(88, QUAROT_R0 ", " QUAROT_R8 ", " QUAROT_R16 ", " QUAROT_R24 ", " QUAROT_R32 ", " "%40, %41, %42, %43", 44, 45, 46, 47, 48, 49,
             QUAROT_F8(0), QUAROT_F8(8), QUAROT_F8(16), QUAROT_F8(24), QUAROT_F8(32), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]))
QUAROT_WGMMA(112, QUAROT_R0 ", " QUAROT_R8 ", " QUAROT_R16 ", " QUAROT_R24 ", " QUAROT_R32 ", " QUAROT_R40 ", " QUAROT_R48, 56, 57, 58, 59, 60, 61,
             QUAROT_F8(0), QUAROT_F8(8), QUAROT_F8(16), QUAROT_F8(24), QUAROT_F8(32), QUAROT_F8(40), QUAROT_F8(48))
QUAROT_WGMMA(128, QUAROT_R0 ", " QUAROT_R8 ", " QUAROT_R16 ", " QUAROT_R24 ", " QUAROT_R32 ", " QUAROT_R40 ", " QUAROT_R48 ", " QUAROT_R56, 64, 65, 66, 67, 68, 69,
             QUAROT_F8(0), QUAROT_F8(8), QUAROT_F8(16), QUAROT_F8(24), QUAROT_F8(32), QUAROT_F8(40), QUAROT_F8(48), QUAROT_F8(56))
QUAROT_WGMMA(144, QUAROT_R0 ", " QUAROT_R8 ", " QUAROT_R16 ", " QUAROT_R24 ", " QUAROT_R32 ", " QUAROT_R40 ", " QUAROT_R48 ", " QUAROT_R56 ", " QUAROT_R64, 72, 73, 74, 75, 76, 77,
             QUAROT_F8(0), QUAROT_F8(8), QUAROT_F8(16), QUAROT_F8(24), QUAROT_F8(32), QUAROT_F8(40), QUAROT_F8(48), QUAROT_F8(56), QUAROT_F8(64))
QUAROT_WGMMA(176, QUAROT_R0 ", " QUAROT_R8 ", " QUAROT_R16 ", " QUAROT_R24 ", " QUAROT_R32 ", " QUAROT_R40 ", " QUAROT_R48 ", " QUAROT_R56 ", " QUAROT_R64 ", " QUAROT_R72 ", " QUAROT_R80, 88, 89, 90, 91, 92, 93,
             QUAROT_F8(0), QUAROT_F8(8), QUAROT_F8(16), QUAROT_F8(24), QUAROT_F8(32), QUAROT_F8(40), QUAROT_F8(48), QUAROT_F8(56), QUAROT_F8(64), QUAROT_F8(72), QUAROT_F8(80))

#undef QUAROT_F8
#undef QUAROT_WGMMA
#undef QUAROT_R0
#undef QUAROT_R8
#undef QUAROT_R16
#undef QUAROT_R24
#undef QUAROT_R32
#undef QUAROT_R40
#undef QUAROT_R48
#undef QUAROT_R56
#undef QUAROT_R64
#undef QUAROT_R72
#undef QUAROT_R80

}  // namespace quarot::sm90
