// rope_kv_append: what lies between the QKV projection and decode attention, in one pass over the row.
//
// A row (token, head) is 8 lanes, 4 rows a warp, as in append_rows.cuh. Lane i holds dims 16 I + 2 i + e throughout, so
// the partner of rotate-half (dim + R/2, R a multiple of 32) is another register of the same lane. R3's butterflies of
// distance 2, 4, 8 cross lanes, all others stay inside; they run in the order 1, 2, 4, .. of rotate_heads.
#include "kv_cache/rope_kv_append.h"

#include "kv_cache/append_rows.cuh"

namespace quarot {
namespace {

constexpr int kWarps = 4;

template <int D>
__device__ __forceinline__ void normalize_row(float (&x)[D / 8], const void* gain, DType dtype, float eps, int place) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 8; ++i) squares += x[i] * x[i];
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) squares += __shfl_xor_sync(0xffffffffu, squares, distance);
    float gains[D / 8];
    load_row<D>(gain, dtype, place, gains);
    const float inverse = rsqrtf(squares * (1.0f / D) + eps);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        x[2 * i] = x[2 * i] * inverse * gains[2 * i], x[2 * i + 1] = x[2 * i + 1] * inverse * gains[2 * i + 1];
    }
}

// x cos + rotate_half(x) sin on the first R dims. Registers need constant indices: one unrolled pass per possible R.
template <int D, int Half = 16>
__device__ __forceinline__ void rope_row(float (&x)[D / 8], const void* cos, const void* sin, DType dtype,
                                         int rotary_dim, int place) {
    if constexpr (Half <= D / 2) {
        if (2 * Half != rotary_dim) return rope_row<D, Half + 16>(x, cos, sin, dtype, rotary_dim, place);
        constexpr int kPer = 2 * Half / 8;
        float c[kPer], s[kPer];
        load_row<2 * Half>(cos, dtype, place, c);
        load_row<2 * Half>(sin, dtype, place, s);
#pragma unroll
        for (int j = 0; j < kPer / 2; ++j) {
            const float a = x[j], b = x[j + kPer / 2];
            x[j] = __fadd_rn(__fmul_rn(a, c[j]), __fmul_rn(-b, s[j]));
            x[j + kPer / 2] = __fadd_rn(__fmul_rn(b, c[j + kPer / 2]), __fmul_rn(a, s[j + kPer / 2]));
        }
    }
}

template <int D>
__device__ __forceinline__ void rotate_row_in_place(float (&x)[D / 8], int place) {
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a + b, x[2 * i + 1] = a - b;
    }
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
        const float sign = place & distance ? -1.0f : 1.0f;
#pragma unroll
        for (int j = 0; j < D / 8; ++j)
            x[j] = fmaf(x[j], sign, __shfl_xor_sync(0xffffffffu, x[j], distance));  // exact product: one rounding
    }
#pragma unroll
    for (int distance = 1; distance < D / 16; distance *= 2) {
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
            if (i & distance) continue;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float a = x[2 * i + e], b = x[2 * (i + distance) + e];
                x[2 * i + e] = a + b, x[2 * (i + distance) + e] = a - b;
            }
        }
    }
    const float scale = static_cast<float>(1.0 / sqrt(static_cast<double>(D)));
#pragma unroll
    for (int j = 0; j < D / 8; ++j) x[j] *= scale;
}

__device__ __forceinline__ void store_two(void* row, DType dtype, int dim, float a, float b) {
    if (dtype == DType::kFloat32) {
        *reinterpret_cast<float2*>(static_cast<float*>(row) + dim) = {a, b};
    } else if (dtype == DType::kFloat16) {
        *reinterpret_cast<__half2*>(static_cast<__half*>(row) + dim) = __floats2half2_rn(a, b);
    } else {
        *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(row) + dim) = __floats2bfloat162_rn(a, b);
    }
}

__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

// Grid: groups of 4 tokens x (Hq + 2 Hkv) heads, head fastest.
template <int D, int Bits, int Groups>
__global__ void __launch_bounds__(32 * kWarps) rope_append_kernel(const __grid_constant__ RopeAppendParams p) {
    // Decode attention reads the pages of all but a sequence's last token before it waits for us.
    if (p.one_each) pdl_trigger();
    pdl_wait();
    const int lane = threadIdx.x % 32, place = lane % 8;
    const int heads = p.query_heads + 2 * p.kv_heads, element = p.dtype == DType::kFloat32 ? 4 : 2;
    const std::int64_t warp = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
    const int head = static_cast<int>(warp % heads);
    const int token = static_cast<int>(warp / heads) * kRowsPerWarp + lane / 8;
    const bool valid = token < p.tokens, is_query = head < p.query_heads;
    const bool is_value = head >= p.query_heads + p.kv_heads;

    const auto at = [&](const void* base, std::int64_t index) {
        return static_cast<const std::uint8_t*>(base) + index * element;
    };
    // One trip to memory instead of three: the slot, and the tables by way of L1, are on their way with the row.
    const int slot = is_query ? -1 : load_slot(p, token);
    const std::int64_t table_row = static_cast<std::int64_t>((valid ? token : 0) % p.table_rows) * p.rotary_dim;
    if (!is_value && place * 64 < p.rotary_dim) {
        prefetch_line(at(p.cos, table_row + place * 64)), prefetch_line(at(p.sin, table_row + place * 64));
    }
    float x[D / 8];
    load_row<D>(at(p.qkv, (valid ? token : 0) * p.qkv_stride + head * D), p.dtype, place, x);
    if (!is_value) {
        const void* gain = is_query ? p.query_norm : p.key_norm;
        if (gain != nullptr) normalize_row<D>(x, gain, p.dtype, p.eps, place);
        rope_row<D>(x, at(p.cos, table_row), at(p.sin, table_row), p.dtype, p.rotary_dim, place);
        if (p.rotate) rotate_row_in_place<D>(x, place);
    }
    if (is_query) {
        if (valid) {
            void* target = static_cast<std::uint8_t*>(p.query) + (static_cast<std::int64_t>(token) * p.query_heads + head) * D * element;
#pragma unroll
            for (int i = 0; i < D / 16; ++i)
                store_two(target, p.dtype, 16 * i + 2 * place, x[2 * i], x[2 * i + 1]);
        }
    } else {
        const int kv_head = head - p.query_heads - (is_value ? p.kv_heads : 0);
        quantize_and_store_row<D, Bits, Groups>(p, !is_value, slot, kv_head, x, lane);
    }
}

template <int D, int Bits, int Groups>
cudaError_t launch_rows(const RopeAppendParams& p, cudaStream_t stream) {
    const std::int64_t warps = (static_cast<std::int64_t>(p.tokens) + kRowsPerWarp - 1) / kRowsPerWarp *
                               (p.query_heads + 2 * p.kv_heads);
    return launch(rope_append_kernel<D, Bits, Groups>, dim3(static_cast<unsigned>((warps + kWarps - 1) / kWarps)),
                  dim3(32 * kWarps), 0, stream, p);
}

using Launcher = cudaError_t (*)(const RopeAppendParams&, cudaStream_t);

Launcher find_launcher(const KVFormat& f, int rotary_dim) {
    if (f.key_bits != f.value_bits || f.key_group != f.value_group || rotary_dim % 32 || rotary_dim > f.head_dim)
        return nullptr;
    const int groups = f.head_dim / f.key_group;
    const struct { int dim, bits, groups; Launcher launcher; } table[] = {
        {64, 4, 1, launch_rows<64, 4, 1>},   {64, 4, 2, launch_rows<64, 4, 2>},   {64, 8, 1, launch_rows<64, 8, 1>},
        {128, 4, 1, launch_rows<128, 4, 1>}, {128, 4, 2, launch_rows<128, 4, 2>}, {128, 4, 4, launch_rows<128, 4, 4>},
        {128, 8, 1, launch_rows<128, 8, 1>}, {128, 2, 1, launch_rows<128, 2, 1>}, {256, 4, 1, launch_rows<256, 4, 1>},
        {256, 4, 2, launch_rows<256, 4, 2>}, {256, 8, 1, launch_rows<256, 8, 1>},
    };
    for (const auto& row : table)
        if (row.dim == f.head_dim && row.bits == f.key_bits && row.groups == groups) return row.launcher;
    return nullptr;
}

}  // namespace

bool rope_kv_append_serves(const KVFormat& format, int rotary_dim) {
    return find_launcher(format, rotary_dim) != nullptr;
}

cudaError_t rope_kv_append(const RopeAppendParams& p, cudaStream_t stream) {
    const Launcher launcher = find_launcher(p.format, p.rotary_dim);
    if (launcher == nullptr) return cudaErrorInvalidValue;
    return p.tokens == 0 ? cudaSuccess : launcher(p, stream);
}

}  // namespace quarot
