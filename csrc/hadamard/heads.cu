// One CTA per row, one warp per 32 columns of head_dim. The row is copied to shared memory once, the accumulators of
// heads_mma.cuh wait for the absmax, and four lanes exchange codes so that each stores eight neighbouring columns.
// csrc/gemm/prologue_heads.cuh does the same inside a GEMM, to the same bits.
#include "hadamard/heads.h"

#include <cmath>

#include "device/launch.cuh"
#include "device/quantize_row.cuh"
#include "device/reduce.cuh"
#include "device/vec8.cuh"
#include "hadamard/heads_mma.cuh"

namespace quarot {
namespace {

using heads::kMaxHeadDim, heads::kMaxHeads;

struct Args {
    const void* x;
    std::int64_t row_stride;
    int heads, head_dim;
    const std::uint32_t* signs;
    float norm;
    void* codes;
    float* scale;
    float clip_over_qmax;
    int bits;
    CodeLayout layout;
};

// Lane c of four holds, of each of four groups of eight columns, the codes of columns 2 c and 2 c + 1 (`pairs`: groups
// 0, 1 and 2, 3). Returns the eight codes of group c.
__device__ __forceinline__ uint2 gather_group(std::uint32_t pairs01, std::uint32_t pairs23, int c) {
    const std::uint32_t even = __byte_perm(pairs01, pairs23, 0x5410), odd = __byte_perm(pairs01, pairs23, 0x7632);
    const std::uint32_t kept = c & 1 ? odd : even;
    const std::uint32_t got = __shfl_xor_sync(kFullWarp, c & 1 ? even : odd, 1);
    const std::uint32_t first = c & 1 ? got : kept, second = c & 1 ? kept : got;
    const std::uint32_t low = __byte_perm(first, second, 0x5410), high = __byte_perm(first, second, 0x7632);
    const std::uint32_t other = __shfl_xor_sync(kFullWarp, c & 2 ? low : high, 2);
    return c & 2 ? make_uint2(other, high) : make_uint2(low, other);
}

// Codes of a and b, in the low halves of their bytes as always, in the two bytes of the result's low half.
__device__ __forceinline__ unsigned code_pair(float a, float b, const RowQuantizer& q) {
#if __CUDA_ARCH__ >= 900  // clamped together behind the rounding, which is the same as long as they fit in 16 bits (dispatch())
    const auto rounded = [&q](float x) { return __float_as_uint(__fadd_rn(__fmul_rn(x, q.inverse), 12582912.0f)); };
    const auto pair = [](float x) { return (static_cast<unsigned>(static_cast<int>(x)) & 0xffffu) * 0x10001u; };
    const unsigned both = __byte_perm(rounded(a), rounded(b), 0x5410);
    return __byte_perm(__vmaxs2(__vmins2(both, pair(q.hi)), pair(q.lo)), 0, 0x4420);
#else
    return __byte_perm(code_bits(a, q), code_bits(b, q), 0x0040);
#endif
}

// TILES: 16 heads each, 2 or 4. kStaged: for many rows, where instructions count and L2 has to take all the codes: they leave
// through shared memory, as whole lines, and no lanes exchange them.
template <typename T, int TILES, bool kStaged>
__global__ void __launch_bounds__(kMaxHeadDim) heads_kernel(const Args a) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ unsigned scratch[32];
    pdl_trigger();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, c = lane & 3;
    std::uint32_t word[TILES];
#pragma unroll
    for (int mt = 0; mt < TILES; ++mt) word[mt] = a.signs[mt * 32 + lane];  // not an output of a kernel
    pdl_wait();

    // X[h][i]; head rows beyond the last are zero.
    const std::int64_t row = blockIdx.x;
    const int pitch = heads::pitch(a.head_dim), chunks = a.head_dim / 8;
    const int first_head = threadIdx.x / chunks, chunk_column = threadIdx.x % chunks;
    const T* x = static_cast<const T*>(a.x) + row * a.row_stride + threadIdx.x * 8;
    uint4 chunk[2 * TILES];
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i)  // blockDim = head_dim: 8 heads each
        chunk[i] = first_head + 8 * i < a.heads ? *reinterpret_cast<const uint4*>(x + i * 8 * a.head_dim)
                                                : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i)
        *reinterpret_cast<uint4*>(shared + (first_head + 8 * i) * pitch + chunk_column * 16) = chunk[i];
    __syncthreads();

    float acc[TILES][4][4] = {};
    const std::uint32_t base = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared)) + (lane & 15) * pitch +
                               (32 * warp + (lane >> 4) * 8) * 2;
#pragma unroll
    for (int q = 0; q < TILES; ++q) {
        std::uint32_t b[2][4];
        heads::ldmatrix4_transposed(b[0], base + 16 * q * pitch);
        heads::ldmatrix4_transposed(b[1], base + 16 * q * pitch + 32);
#pragma unroll
        for (int mt = 0; mt < TILES; ++mt) {
            std::uint32_t h[4];
            heads::sign_fragment<T>(h, word[mt], q);
#pragma unroll
            for (int n = 0; n < 4; ++n) heads::mma<T>(acc[mt][n], h, b[n / 2][2 * (n & 1)], b[n / 2][2 * (n & 1) + 1]);
        }
    }

    float largest = 0.0f;
#pragma unroll
    for (int mt = 0; mt < TILES; ++mt)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool counts = 16 * mt + g + 8 * half < a.heads;
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& value = acc[mt][n][2 * half + i];
                    value *= a.norm;
                    if (counts) asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(fabsf(value)));
                }
        }
    const float top = __uint_as_float(block_max(abs_bits(largest), scratch));
    const auto q = row_quantizer(top, a.clip_over_qmax, a.bits, a.layout);
    if (threadIdx.x == 0) a.scale[row] = q.scale;
    const int width = a.heads * a.head_dim / (a.layout == CodeLayout::kNibbles ? 2 : 1);
    unsigned char* codes = static_cast<unsigned char*>(a.codes) + row * width;
    if constexpr (kStaged) {  // over X, which has been read by all: block_max has a barrier
        const int staged_pitch = a.head_dim + 16;  // 16: the eight heads of a store lie in different banks
        unsigned char* mine = shared + g * staged_pitch + 32 * warp + 2 * c;
#pragma unroll
        for (int mt = 0; mt < TILES; ++mt)
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int n = 0; n < 4; ++n)
                    *reinterpret_cast<std::uint16_t*>(mine + (16 * mt + 8 * half) * staged_pitch + 8 * n) =
                        static_cast<std::uint16_t>(
                            code_pair(acc[mt][n][2 * half], acc[mt][n][2 * half + 1], q));
        __syncthreads();
        const int pieces = a.head_dim / 16, piece_head = threadIdx.x / pieces, column = threadIdx.x % pieces * 16;
        const bool upper = a.layout == CodeLayout::kUpperHalves;
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const int head = piece_head + 16 * i;
            if (head >= a.heads) break;
            uint4 v = *reinterpret_cast<const uint4*>(shared + head * staged_pitch + column);
            if (upper) v = make_uint4(upper_halves(v.x), upper_halves(v.y), upper_halves(v.z), upper_halves(v.w));
            *reinterpret_cast<uint4*>(codes + head * a.head_dim + column) = v;
        }
    } else {
#pragma unroll
        for (int mt = 0; mt < TILES; ++mt)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                std::uint32_t e[4][2];
#pragma unroll
                for (int n = 0; n < 4; ++n)
#pragma unroll
                    for (int i = 0; i < 2; ++i) e[n][i] = code_bits(acc[mt][n][2 * half + i], q);
                const uint2 mine = gather_group(pack_bytes(e[0][0], e[0][1], e[1][0], e[1][1]),
                                                pack_bytes(e[2][0], e[2][1], e[3][0], e[3][1]), c);
                const int head = 16 * mt + g + 8 * half;
                if (head < a.heads) store_codes8(codes, (head * a.head_dim + 32 * warp) / 8 + c, a.layout, mine);
            }
    }
}

template <typename T>
cudaError_t dispatch(const Args& a, std::int64_t rows, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(rows)), block(a.head_dim);
    const int tiles = heads::tiles(a.heads);
    const std::size_t bytes = 16 * tiles * heads::pitch(a.head_dim);
    // A code is at most 1 / clip_over_qmax before it is clamped.
    const bool staged = a.layout != CodeLayout::kNibbles && rows > 2 * current_device().multiprocessors &&
                        a.clip_over_qmax > 1e-4f;
    if (staged)
        return tiles == 2 ? launch(heads_kernel<T, 2, true>, grid, block, bytes, stream, a)
                          : launch(heads_kernel<T, 4, true>, grid, block, bytes, stream, a);
    return tiles == 2 ? launch(heads_kernel<T, 2, false>, grid, block, bytes, stream, a)
                      : launch(heads_kernel<T, 4, false>, grid, block, bytes, stream, a);
}

}  // namespace

cudaError_t hadamard_heads_quantize(const HeadsInput& in, void* codes, float* scale, float clip_over_qmax, int bits,
                                    CodeLayout layout, cudaStream_t stream) {
    if (in.rows < 1 || in.rows > 0x7fffffff || in.heads < 1 || in.heads > kMaxHeads || in.head_dim % 32 != 0 ||
        in.head_dim > kMaxHeadDim || !layout_fits(layout, bits) || in.dtype == DType::kFloat32)
        return cudaErrorInvalidValue;
    const Args a{in.x, in.row_stride, in.heads, in.head_dim, in.signs,
                 static_cast<float>(1.0 / std::sqrt(static_cast<double>(in.heads))), codes, scale, clip_over_qmax, bits,
                 layout};
    return in.dtype == DType::kFloat16 ? dispatch<__half>(a, in.rows, stream)
                                       : dispatch<__nv_bfloat16>(a, in.rows, stream);
}

}  // namespace quarot
