// One CTA transforms one unit (order x pow2 x inner) of one row in shared memory, fp32:
//   1. load, SiLU * up, the three lowest butterfly levels in registers where a thread's eight elements span them;
//   2. the other levels of H_pow2 in shared memory, three at a time;
//   3. H_order by mma.m16n8k8 in tf32 (fp32 input: split into two tf32 parts, so nothing is lost), signs expanded from
//      a bit table; results leave from the accumulators, so the unit is not overwritten.
// Units beyond the shared memory are cut along pow2 into `slices`, each combined from all of them while loading.
// The quantiser needs the absmax of a whole row first: step 3 runs twice, and with several units steps 1 and 2 too.
#include "hadamard/any_size.h"

#include <algorithm>
#include <cmath>

#include "device/launch.cuh"
#include "device/quantize_row.cuh"
#include "device/reduce.cuh"
#include "device/vec8.cuh"
#include "hadamard/silu.cuh"

namespace quarot {
namespace {

constexpr int kMaxThreads = 384;  // 512 would leave 128 registers: spills
constexpr int kPad = 8;  // floats a row of the unit: fragment loads (4 rows x 8 columns) then hit 32 different banks

struct Args {
    const void* x;
    std::int64_t row_stride;
    int width, order, pow2, inner, blocks, slices;  // pow2 of one slice
    int columns, pitch;                             // pow2 * inner, and the distance of rows in shared memory
    const std::uint32_t* signs;
    float norm;
    void* y;  // or codes
    float* scale;
    float clip_over_qmax;
    int bits, code_width;  // bytes a row of codes
    bool aligned;
    CodeLayout layout;
};

template <typename T, bool kSilu>
__device__ __forceinline__ float load_one(const Args& a, const T* row, int i) {
    const float v = to_float(row[i]);
    if constexpr (kSilu) return silu_exact(v) * to_float(row[a.width + i]);
    return v;
}

template <typename T, bool kSilu>
__device__ __forceinline__ void load_eight(const Args& a, const T* row, int i, float (&v)[8]) {
    if (a.aligned) {
        load8(row, i, i + 8).unpack(v);
        if constexpr (kSilu) {
            float up[8];
            load8(row + a.width, i, i + 8).unpack(up);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = silu_exact(v[j]) * up[j];
        }
    } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) v[j] = load_one<T, kSilu>(a, row, i + j);
    }
}

// Butterflies between v[0..R-1].
template <int R>
__device__ __forceinline__ void butterfly(float* v) {
#pragma unroll
    for (int bit = 1; bit < R; bit *= 2)
#pragma unroll
        for (int i = 0; i < R; ++i)
            if (!(i & bit)) {
                const float x = v[i], y = v[i | bit];
                v[i] = x + y, v[i | bit] = x - y;
            }
}

template <int R>
__device__ __forceinline__ void butterfly_pass(const Args& a, float* unit, int stride) {
    const int per_row = a.columns / R;
    for (int i = threadIdx.x; i < a.order * per_row; i += blockDim.x) {
        const int o = i / per_row, rest = i % per_row;
        float* p = unit + o * a.pitch + rest / stride * stride * R + rest % stride;
        float v[R];
#pragma unroll
        for (int j = 0; j < R; ++j) v[j] = p[j * stride];
        butterfly<R>(v);
#pragma unroll
        for (int j = 0; j < R; ++j) p[j * stride] = v[j];
    }
    __syncthreads();
}

__device__ __forceinline__ float round_tf32(float x) {
    std::uint32_t y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return __uint_as_float(y);
}

// Steps 1 and 2: the unit (block, slice) of a row, without its norm.
template <typename T, bool kSilu>
__device__ void fill(const Args& a, const T* row, int block, int slice, float* unit) {
    const int slice_stride = a.columns;  // elements from one slice to the next
    const T* source = row + block * a.order * a.columns * a.slices;
    const auto sign = [&](int part) { return __popc(part & slice) & 1 ? -1.0f : 1.0f; };
    int stride = a.inner, levels = 31 - __clz(a.pow2);
    if (a.inner == 1 && a.pow2 >= 8) {
        const int per_row = a.columns / 8;
        for (int i = threadIdx.x; i < a.order * per_row; i += blockDim.x) {
            const int o = i / per_row, c = i % per_row * 8;
            float v[8];
            load_eight<T, kSilu>(a, source, o * a.slices * slice_stride + c, v);
            for (int part = 1; part < a.slices; ++part) {
                float w[8];
                load_eight<T, kSilu>(a, source, (o * a.slices + part) * slice_stride + c, w);
#pragma unroll
                for (int j = 0; j < 8; ++j) v[j] = fmaf(w[j], sign(part), v[j]);
            }
            butterfly<8>(v);
            float4* p = reinterpret_cast<float4*>(unit + o * a.pitch + c);
            p[0] = make_float4(v[0], v[1], v[2], v[3]);
            p[1] = make_float4(v[4], v[5], v[6], v[7]);
        }
        stride = 8, levels -= 3;
    } else {
        for (int i = threadIdx.x; i < a.order * a.columns; i += blockDim.x) {
            const int o = i / a.columns, c = i % a.columns;
            float v = load_one<T, kSilu>(a, source, o * a.slices * slice_stride + c);
            for (int part = 1; part < a.slices; ++part)
                v = fmaf(load_one<T, kSilu>(a, source, (o * a.slices + part) * slice_stride + c), sign(part), v);
            unit[o * a.pitch + c] = v;
        }
    }
    if (a.order > 1)  // rows that the mma reads beyond the last one
        for (int i = threadIdx.x; i < ((a.order + 7) / 8 * 8 - a.order) * a.pitch; i += blockDim.x)
            unit[a.order * a.pitch + i] = 0.0f;
    __syncthreads();
    while (levels > 0) {
        const int now = min(levels, 3);
        if (now == 3) butterfly_pass<8>(a, unit, stride);
        if (now == 2) butterfly_pass<4>(a, unit, stride);
        if (now == 1) butterfly_pass<2>(a, unit, stride);
        stride <<= now, levels -= now;
    }
}

__device__ __forceinline__ void mma_tf32(float (&d)[4], const std::uint32_t (&a)[4], float b0, float b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

// Step 3: calls use(o, column, v0, v1) with the values of (o, column) and (o, column + 1), every pair of the unit once.
// The second of a pair may lie beyond the unit when columns is odd.
template <typename T, typename Use>
__device__ __forceinline__ void emit(const Args& a, const float* unit, Use use) {
    if (a.order == 1) {
        for (int c = 2 * threadIdx.x; c < a.columns; c += 2 * blockDim.x)
            use(0, c, unit[c] * a.norm, c + 1 < a.columns ? unit[c + 1] * a.norm : 0.0f);
        return;
    }
    constexpr int kRows = sizeof(T) == 4 ? 2 : 4, kColumns = 4;  // mma tiles of one warp: 64 (32) x 32
    const int lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3, warps = blockDim.x >> 5;
    const int row_tiles = (a.order + 15) / 16, k_tiles = (a.order + 63) / 64;
    const int row_groups = (row_tiles + kRows - 1) / kRows, column_groups = (a.columns + 31) / 32;
    for (int job = threadIdx.x >> 5; job < row_groups * column_groups; job += warps) {
        const int first_row = job / column_groups * kRows, first_column = job % column_groups * 32;
        float acc[kRows][kColumns][4] = {};
        for (int kt = 0; kt < k_tiles; ++kt) {
            std::uint32_t word[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                word[r] = first_row + r < row_tiles ? a.signs[((first_row + r) * k_tiles + kt) * 32 + lane] : 0u;
            const int steps = min(8, (a.order - 64 * kt + 7) / 8);
            for (int q = 0; q < steps; ++q) {
                const float* p = unit + (64 * kt + 8 * q + c) * a.pitch + first_column + g;
                float b[kColumns][2];
#pragma unroll
                for (int n = 0; n < kColumns; ++n) b[n][0] = p[8 * n], b[n][1] = p[8 * n + 4 * a.pitch];
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    std::uint32_t h[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) h[i] = ((word[r] << i) & 0x80000000u) | 0x3f800000u;
                    word[r] <<= 4;
#pragma unroll
                    for (int n = 0; n < kColumns; ++n) {
                        if constexpr (sizeof(T) == 4) {
                            // x = high + low exactly; both rounded to 11 bits leave an error of 2^-24. The tensor core
                            // truncates its sums, so long ones are left to ordinary additions.
                            const float high0 = round_tf32(b[n][0]), high1 = round_tf32(b[n][1]);
                            float part[4] = {};
                            mma_tf32(part, h, round_tf32(b[n][0] - high0), round_tf32(b[n][1] - high1));
                            mma_tf32(part, h, high0, high1);
#pragma unroll
                            for (int i = 0; i < 4; ++i) acc[r][n][i] += part[i];
                        } else {
                            mma_tf32(acc[r][n], h, round_tf32(b[n][0]), round_tf32(b[n][1]));
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int n = 0; n < kColumns; ++n)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int o = 16 * (first_row + r) + g + 8 * half, column = first_column + 8 * n + 2 * c;
                    if (o < a.order && column < a.columns)
                        use(o, column, acc[r][n][2 * half] * a.norm, acc[r][n][2 * half + 1] * a.norm);
                }
    }
}

// Column of the row at which element (o, 0) of a unit lies.
__device__ __forceinline__ int row_offset(const Args& a, int block, int slice, int o) {
    return ((block * a.order + o) * a.slices + slice) * a.columns;
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads) hadamard_any_kernel(const Args a) {
    extern __shared__ float unit[];
    pdl_trigger();
    pdl_wait();
    const std::int64_t row = blockIdx.x;
    const int block = blockIdx.y / a.slices, slice = blockIdx.y % a.slices;
    fill<T, false>(a, static_cast<const T*>(a.x) + row * a.row_stride, block, slice, unit);
    T* y = static_cast<T*>(a.y) + row * a.width;
    emit<T>(a, unit, [&](int o, int column, float v0, float v1) {
        T* p = y + row_offset(a, block, slice, o) + column;
        p[0] = static_cast<T>(v0);
        if (column + 1 < a.columns) p[1] = static_cast<T>(v1);
    });
}

template <typename T, bool kSilu>
__global__ void __launch_bounds__(kMaxThreads) hadamard_quantize_any_kernel(const Args a) {
    extern __shared__ float unit[];
    __shared__ unsigned scratch[32];
    pdl_trigger();
    pdl_wait();
    const std::int64_t row = blockIdx.x;
    const T* x = static_cast<const T*>(a.x) + row * a.row_stride;
    const int units = a.blocks * a.slices;
    unsigned top = 0;
    for (int u = 0; u < units; ++u) {
        if (u > 0) __syncthreads();
        fill<T, kSilu>(a, x, u / a.slices, u % a.slices, unit);
        emit<T>(a, unit, [&](int, int column, float v0, float v1) {
            top = max(top, abs_bits(v0));
            if (column + 1 < a.columns) top = max(top, abs_bits(v1));
        });
    }
    const auto q = row_quantizer(__uint_as_float(block_max(top, scratch)), a.clip_over_qmax, a.bits, a.layout);
    if (threadIdx.x == 0) a.scale[row] = q.scale;
    std::int8_t* codes = static_cast<std::int8_t*>(a.y) + row * a.code_width;
    const bool nibbles = a.layout == CodeLayout::kNibbles;
    const int shift = a.layout == CodeLayout::kUpperHalves ? 4 : 0;
    for (int u = 0; u < units; ++u) {
        if (units > 1) {
            __syncthreads();
            fill<T, kSilu>(a, x, u / a.slices, u % a.slices, unit);
        }
        emit<T>(a, unit, [&](int o, int column, float v0, float v1) {
            const unsigned e0 = code_bits(v0, q) << shift, e1 = code_bits(v1, q) << shift;
            const int at = row_offset(a, u / a.slices, u % a.slices, o) + column;
            if (nibbles) {
                codes[at / 2] = static_cast<std::int8_t>((e0 & 15) | (e1 & 15) << 4);
            } else {
                codes[at] = static_cast<std::int8_t>(e0);
                if (column + 1 < a.columns) codes[at + 1] = static_cast<std::int8_t>(e1);
            }
        });
    }
    for (int i = (nibbles ? a.width / 2 : a.width) + threadIdx.x; i < a.code_width; i += blockDim.x) codes[i] = 0;
}

template <typename Kernel>
cudaError_t launch_units(Kernel kernel, Args& a, const HadamardInput& input, int grid_y_units, cudaStream_t stream) {
    const HadamardShape& s = input.shape;
    const std::int64_t width = input.dtype == DType::kFloat32 ? 4 : 2;
    if (input.rows < 1 || input.rows > 0x7fffffff || s.width() > (1 << 24)) return cudaErrorInvalidValue;
    const int shared_limit = current_device().shared_per_block - 1024;
    a.x = input.x, a.row_stride = input.row_stride, a.signs = input.signs;
    a.width = static_cast<int>(s.width()), a.order = static_cast<int>(s.order), a.inner = static_cast<int>(s.inner);
    a.blocks = static_cast<int>(s.blocks);
    a.norm = static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.order * s.pow2)));
    // Halve the unit until it fits; a unit of 1 x inner that does not fit is refused.
    std::int64_t bytes = 0;
    for (a.slices = 1;; a.slices *= 2) {
        if (a.slices > s.pow2) return cudaErrorInvalidConfiguration;
        a.pow2 = static_cast<int>(s.pow2 / a.slices);
        a.columns = a.pow2 * a.inner;
        a.pitch = a.order == 1 ? a.columns : (a.columns + 31) / 32 * 32 + kPad;
        bytes = 4 * ((s.order == 1 ? 1 : (s.order + 7) / 8 * 8) * static_cast<std::int64_t>(a.pitch) + 32);
        if (bytes <= shared_limit) break;
    }
    a.aligned = reinterpret_cast<std::uintptr_t>(a.x) % 16 == 0 && a.width % 8 == 0 &&
                (input.rows == 1 || a.row_stride * width % 16 == 0);
    const std::int64_t unit = static_cast<std::int64_t>(a.order) * a.columns;
    const int threads = unit <= 1024 ? 64 : unit <= 4096 ? 128 : unit <= 16384 ? 256 : kMaxThreads;
    const dim3 grid(static_cast<unsigned>(input.rows), grid_y_units ? a.blocks * a.slices : 1);
    return launch(kernel, grid, dim3(threads), static_cast<std::size_t>(bytes), stream, a);
}

}  // namespace

cudaError_t hadamard_any_size(const HadamardInput& input, void* y, cudaStream_t stream) {
    if (input.silu) return cudaErrorInvalidValue;
    Args a{};
    a.y = y;
    switch (input.dtype) {
        case DType::kFloat16: return launch_units(hadamard_any_kernel<__half>, a, input, 1, stream);
        case DType::kBFloat16: return launch_units(hadamard_any_kernel<__nv_bfloat16>, a, input, 1, stream);
        default: return launch_units(hadamard_any_kernel<float>, a, input, 1, stream);
    }
}

cudaError_t hadamard_quantize_any_size(const HadamardInput& input, void* codes, float* scale, float clip_over_qmax,
                                       int bits, CodeLayout layout, cudaStream_t stream) {
    if (!layout_fits(layout, bits)) return cudaErrorInvalidValue;
    const bool nibbles = layout == CodeLayout::kNibbles;
    if (nibbles && input.shape.pow2 * input.shape.inner % 2) return cudaErrorInvalidValue;  // bytes are written in pairs
    Args a{};
    a.y = codes, a.scale = scale, a.clip_over_qmax = clip_over_qmax, a.bits = bits, a.layout = layout;
    a.code_width = static_cast<int>((input.shape.width() + 31) / 32 * (nibbles ? 16 : 32));
    const auto run = [&](auto with_silu, auto without) {
        return input.silu ? launch_units(with_silu, a, input, 0, stream) : launch_units(without, a, input, 0, stream);
    };
    switch (input.dtype) {
        case DType::kFloat16:
            return run(hadamard_quantize_any_kernel<__half, true>, hadamard_quantize_any_kernel<__half, false>);
        case DType::kBFloat16:
            return run(hadamard_quantize_any_kernel<__nv_bfloat16, true>,
                       hadamard_quantize_any_kernel<__nv_bfloat16, false>);
        default: return run(hadamard_quantize_any_kernel<float, true>, hadamard_quantize_any_kernel<float, false>);
    }
}

}  // namespace quarot
