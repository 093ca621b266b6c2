// silu(gate) * up, the Hadamard H_m (x) H_64 and the quantiser as the beginning of a few-token GEMM, for one row
// (csrc/hadamard/sm90/transform.cuh is the same as a kernel of its own; codes and scale are equal bit for bit).
//
// Every block does it for itself, with all its warps:
//   1. each lane copies the chunks of gate and up that it uses, H_2 over bit 5 in fp32, one rounding to fp16 into X[m][64];
//   2. H_32 by mma.sync, the warpgroups taking turns over m; the result is stored as the A operand of
//   3. H_m by wgmma, each warpgroup 48 of the outputs m. H_m comes as bits and is expanded while 1. waits.
#pragma once

#include "device/async_copy.cuh"
#include "device/quantize_row.cuh"
#include "device/reduce.cuh"
#include "gemm/skinny_kernel.cuh"
#include "hadamard/sm90/row_range.cuh"
#include "hadamard/sm90/stage1.cuh"
#include "hadamard/sm90/wgmma_shared.cuh"

namespace quarot::skinny {

/// MP: m padded to a multiple of 16, at most 192. Element: __half or __nv_bfloat16.
template <typename Element, int MP>
struct RotatedSilu {
    static constexpr bool kMade = true, kOneChunk = false, kOneRow = true, kAdds = true;
    using Output = Element;
    static constexpr int kSteps = MP / 16, kTile = 512, kTiles = (MP + 7) / 8;  // tiles of 8 rows of X
    static constexpr int kOutputs = 48;                                        // m of one warpgroup
    struct Arguments {
        Element const* gate_up;  ///< [2 * 64 * m], 16-byte aligned
        int m;
        uint8_t const* signs;  ///< [MP / 8][MP]: bit i of byte (k8, j) is set where H_m[j][8 k8 + i] = -1, none for j >= m
        float norm;            ///< 8 / sqrt(64 m): the constants of H_32 are 1/8
        float clip_over_qmax;
        int bits;
    };

    // Shared memory: H_m^T as fp16 [MP / 8][MP][8], X, and the copies, which the A operand overwrites.
    static constexpr int kTableBytes = MP * MP * 2, kXBytes = MP * 128, kCopyBytes = kTiles * kTile * 4;
    static constexpr int kBytes = kTableBytes + kXBytes + kCopyBytes;
    static_assert(MP % 16 == 0 && MP <= 4 * kOutputs && MP * 128 <= kCopyBytes);

    // Codes: 16 bytes after every 128, so that the stores of eight rows of X meet different banks.
    template <class Layout, int WARPS>
    static __host__ __device__ constexpr int row_stride() { return 0; }
    template <class Layout>
    static __host__ __device__ constexpr int chunk_stride() { return Layout::kChunk + Layout::kChunk / 8; }
    static __host__ __device__ constexpr int unit_offset(int u) { return u * kUnit + u / 2 * 16; }
    template <class Layout, int WARPS>
    static __host__ __device__ constexpr int code_bytes(int) {
        return (MP * 64 + Layout::kChunk - 1) / Layout::kChunk * chunk_stride<Layout>();
    }

    struct Early {
        Element const* gate;  // this lane's first chunk
        uint2 signs;          // eight bytes of the table
    };
    static_assert(MP % 8 == 0 && MP * MP / 64 <= 512);

    /// Rows of X beyond m are zero.
    template <int WARPS>
    static __device__ Early begin(Arguments const& a, int, char* own) {
        static_assert(WARPS == 16);
        uint32_t const x = uint32_t(__cvta_generic_to_shared(own)) + kTableBytes;
        for (int i = threadIdx.x; i < (MP - a.m) * 8; i += WARPS * 32)
            sm90::store_shared(x + a.m * 128 + i * 16, {0, 0, 0, 0});
        Early early{a.gate_up + threadIdx.x / 4 * 64 + threadIdx.x % 4 * 8, {0, 0}};
        made_by_now(early.gate);
        if (threadIdx.x < MP * MP / 64) early.signs = reinterpret_cast<uint2 const*>(a.signs)[threadIdx.x];
        return early;
    }

    /// H_m^T in fp16 from its signs: this thread has rows j .. j + 7 of columns k .. k + 7. Neighbours begin at different
    /// rows, so that their stores meet different banks.
    static __device__ void expand(Arguments const& a, uint2 signs, uint32_t table) {
        int const place = 8 * threadIdx.x, first_j = place % MP, k = place / MP * 8;
        if (k >= MP) return;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            int const part = (i + threadIdx.x) % 8, j = first_j + part;
            unsigned const bits = __byte_perm(signs.x, signs.y, part);  // the byte, and others above it
            uint32_t const one = j < a.m ? 0x3c003c00u : 0u;  // the outputs beyond m are zero; no bits are set there
            uint32_t w[4];
#pragma unroll
            for (int q = 0; q < 4; ++q)
                w[q] = one ^ (bits << (15 - 2 * q) & 0x8000u) ^ (bits << (30 - 2 * q) & 0x80000000u);
            sm90::store_shared(table + (place + part) * 16, w);
        }
    }

    template <class Layout, int WARPS, class Meanwhile>
    static __device__ void make(Arguments const& a, Early const& early, int, char* codes, float* token_scale, char* own,
                                Meanwhile const& meanwhile) {
        __shared__ unsigned peaks[WARPS], product_peaks[WARPS], tops[WARPS];
        int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, w = warp % 4, group = warp / 4;
        int const row_in_tile = lane / 4, c = lane % 4, n = a.m * 64;
        uint32_t const table = uint32_t(__cvta_generic_to_shared(own)), x = table + kTableBytes, copies = x + kXBytes;
        auto const largest_of = [&](unsigned const* values) {
            return __reduce_max_sync(kFullWarp, lane < WARPS ? values[lane] : 0u);
        };

        // ---- 1. This lane has, of row 8 tile + lane / 4, chunks c = lane % 4 and c + 4 of 64 columns.
        constexpr int kRounds = (kTiles + WARPS - 1) / WARPS;
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            int const tile = warp + round * WARPS, row = 8 * tile + row_in_tile;
            uint32_t const target = copies + tile * (4 * kTile) + lane * 16;
            if (row < a.m) {
                Element const* const gate = early.gate + round * WARPS * 8 * 64;
                copy_16_bytes(target, gate);
                copy_16_bytes(target + kTile, gate + n);
                copy_16_bytes(target + 2 * kTile, gate + 32);
                copy_16_bytes(target + 3 * kTile, gate + n + 32);
            }
            asm volatile("cp.async.commit_group;" ::: "memory");
        }
        meanwhile();
        expand(a, early.signs, table);  // while they are on their way
        __half2 peak = __half2half2(__ushort_as_half(0));
        auto const store_chunks = [&](int row, float const(&p)[2][8]) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t packed[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    packed[j] = sm90::pack_half2(p[i][2 * j], p[i][2 * j + 1]);
                    peak = __hmax2(peak, __habs2(*reinterpret_cast<__half2 const*>(&packed[j])));
                }
                sm90::store_shared(x + row * 128 + sm90::swizzle(row_in_tile, c + 4 * i), packed);
            }
        };
        uint32_t products = 0;
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            if (round + 1 < kRounds)
                asm volatile("cp.async.wait_group 1;" ::: "memory");
            else
                asm volatile("cp.async.wait_group 0;" ::: "memory");
            int const tile = warp + round * WARPS, row = 8 * tile + row_in_tile;
            if (row >= a.m) continue;
            uint32_t const source = copies + tile * (4 * kTile) + lane * 16;
            float p[2][8];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint4 const gate = sm90::load_shared(source + 2 * i * kTile);
                uint4 const up = sm90::load_shared(source + (2 * i + 1) * kTile);
                sm90::fast_values<Element, true>(gate, up, p[i], products);
            }
            sm90::butterflies(p);
            store_chunks(row, p);
        }
        unsigned const warp_peak = __reduce_max_sync(kFullWarp, sm90::largest_half<__half>(sm90::as_word(peak)));
        unsigned const warp_products = __reduce_max_sync(kFullWarp, sm90::largest_half<Element>(products));
        if (lane == 0) peaks[warp] = warp_peak, product_peaks[warp] = warp_products;
        __syncthreads();
        float factor_inverse = 1.0f;
        float const largest = __uint_as_float(largest_of(peaks));
        if (sm90::leaves_range<true, 1>(largest, __uint_as_float(largest_of(product_peaks)))) {
            // Once more from global memory, exactly, times a power of two.
            auto const for_each_tile = [&](auto&& use) {
#pragma unroll 1
                for (int row = 8 * warp + row_in_tile; row < a.m; row += 8 * WARPS) {
                    float p[2][8];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        Element const* const gate = a.gate_up + row * 64 + 8 * c + 32 * i;
                        sm90::exact_values<Element, true>(*reinterpret_cast<uint4 const*>(gate),
                                                          *reinterpret_cast<uint4 const*>(gate + n), p[i]);
                    }
                    sm90::butterflies(p);
                    use(row, p);
                }
            };
            unsigned top = 0;
            for_each_tile([&](int, float const(&p)[2][8]) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int j = 0; j < 8; ++j) top = max(top, abs_bits(p[i][j]));
            });
            top = __reduce_max_sync(kFullWarp, top);
            if (lane == 0) tops[warp] = top;
            __syncthreads();
            float const factor = sm90::range_factor(largest_of(tops));
            factor_inverse = 1.0f / factor;
            for_each_tile([&](int row, float(&p)[2][8]) {
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int j = 0; j < 8; ++j) p[i][j] *= factor;
                store_chunks(row, p);
            });
            __syncthreads();
        }

        // ---- 2. (X H_64)^T, 64 columns by m, as the A operand: 8 x 16-byte core matrices, those of 8 m together.
        uint32_t h16[4];
        sm90::h16_fragment<true>(lane, 0x3000u, h16);  // +-1/8 in fp16
        uint32_t const odd_sign = (w & 1) * 0x80008000u;
        uint32_t const fragment_address = x + ((lane & 7) + (lane >> 4) * 8) * 128 +
                                          sm90::swizzle(lane & 7, 4 * (w >> 1) + (lane >> 3 & 1));
        for (int step = group; step < kSteps; step += WARPS / 4) {
            float lo[4] = {}, hi[4] = {};
            uint32_t b[4];
            sm90::ldmatrix4(b, fragment_address + step * 2048);
            sm90::mma16816(lo, h16, b[0], b[1]);
            sm90::mma16816(hi, h16, b[2], b[3]);
            sm90::ldmatrix4(b, (fragment_address ^ 32) + step * 2048);
            uint32_t const h16_odd[4] = {h16[0] ^ odd_sign, h16[1] ^ odd_sign, h16[2] ^ odd_sign, h16[3] ^ odd_sign};
            sm90::mma16816(lo, h16_odd, b[0], b[1]);
            sm90::mma16816(hi, h16_odd, b[2], b[3]);
            uint32_t const core = copies + step * 2048 + w * 256 + lane * 4;
            sm90::store_shared(core, sm90::pack_half2(lo[0], lo[1]));
            sm90::store_shared(core + 128, sm90::pack_half2(lo[2], lo[3]));
            sm90::store_shared(core + 1024, sm90::pack_half2(hi[0], hi[1]));
            sm90::store_shared(core + 1024 + 128, sm90::pack_half2(hi[2], hi[3]));
        }
        fence_proxy_async();
        __syncthreads();

        // ---- 3. Outputs m from 48 * group on; those beyond MP are read from whatever follows and are not used.
        float acc[kOutputs / 2];
        uint64_t const a_first = sm90::b_descriptor(copies, 1024);
        uint64_t const b_first = sm90::b_descriptor(table + group * kOutputs * 16, MP * 16);
        sm90::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
            sm90::WgmmaShared<kOutputs>::run(acc, a_first + step * (2048 >> 4), b_first + step * (2 * MP * 16 >> 4),
                                             step > 0);
        sm90::wgmma_commit();
        sm90::wgmma_wait();

        float top0 = 0.0f, top1 = 0.0f;
#pragma unroll
        for (int j = 0; j < kOutputs / 8; ++j) {
            if (group * kOutputs + 8 * j >= MP) break;
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                asm("max.NaN.f32 %0, %0, %1;" : "+f"(top0) : "f"(fabsf(acc[4 * j + i])));
                asm("max.NaN.f32 %0, %0, %1;" : "+f"(top1) : "f"(fabsf(acc[4 * j + i + 1])));
            }
        }
        unsigned const warp_top = __reduce_max_sync(kFullWarp, max(abs_bits(top0), abs_bits(top1)));
        if (lane == 0) peaks[warp] = warp_top;
        __syncthreads();
        RowQuantizer const q =
            row_quantizer(__uint_as_float(largest_of(peaks)) * a.norm * factor_inverse, a.clip_over_qmax, a.bits);
        if (threadIdx.x == 0) token_scale[0] = q.scale;
        sm90::CodeWords const words(q, factor_inverse, a.norm);
        // This lane ends up with columns 64 m + 16 w + 4 (lane % 4) .. + 3, m = 48 group + lane / 4 + 8 j.
        int const m_first = group * kOutputs + row_in_tile;
        char* const target = codes + m_first * 64 + m_first / 2 * 16 + 16 * w + 4 * c;
#pragma unroll
        for (int j = 0; j < kOutputs / 8; ++j) {
            unsigned const four = words.of(&acc[4 * j]);
            if (m_first + 8 * j < a.m) *reinterpret_cast<unsigned*>(target + j * (512 + 64)) = four;
        }
        __syncthreads();
    }

    static __device__ __forceinline__ void fence_proxy_async() {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
};

}  // namespace quarot::skinny
