// [silu(gate) * up ->] H_b, H_m -> absmax -> codes and scale for many rows: what transform.cuh does, to the same bits,
// with whole rows in shared memory (NOTES.md, "Whole rows").
//
//   1. copy:  a ring of whole rows (gate and up: two slots a row), shared by the groups. The copy engine lays each down
//             as X[T][m][64], 128-byte rows, swizzled, where ldmatrix will read it: there is no separate X.
//   2. stage 1: elementwise work and the butterflies over bits 5 and up of b, in place. fp16 without SiLU and T = 1 has
//             one butterfly and nothing else: one fp16 multiply-add on the fragments instead, which rounds alike.
//   3. H_32, H_m, codes: as in transform.cuh.
// A row whose values leave the safe fp16 range is done again from global memory, times a power of two.
#pragma once

#include <algorithm>
#include <type_traits>

#include "device/async_copy.cuh"
#include "device/launch.cuh"
#include "device/reduce.cuh"
#include "gemm/sm90/tensor_map.h"
#include "hadamard/sm90/direct_shapes.h"
#include "hadamard/sm90/row_range.cuh"
#include "hadamard/sm90/stage1.cuh"
#include "hadamard/sm90/transform.h"
#include "hadamard/sm90/wgmma.cuh"

namespace quarot::sm90 {

// MP, T, NG: as in shape.cuh; a group has T warpgroups. SLOTS: of m x 64 T elements, in shared memory. UPS: of the
// slots, those for up where there is SiLU: they are free again after stage 1, the others only after H_m. STAGED: codes
// leave through shared memory.
template <int MP_, int T_, int NG_, int SLOTS_, int UPS_, bool STAGED_>
struct DirectShape {
    static constexpr bool kStaged = STAGED_;
    static constexpr int MP = MP_, T = T_, NG = NG_, kSlots = SLOTS_, kUps = UPS_;
    static constexpr int kWarps = 4 * T, kGroupThreads = 32 * kWarps, kThreads = NG * kGroupThreads;
    static constexpr int kSteps = MP / 16;
    static constexpr int kTileBytes = MP * 128, kXBytes = T * kTileBytes, kTableBytes = MP * MP * 2;
    static_assert(MP % 16 == 0 && MP <= 256 && (T == 1 || T == 2) && kXBytes % 1024 == 0);
    static_assert(NG <= kUps && NG <= kSlots - kUps);
    static_assert(kSlots * kXBytes + kTableBytes <= 227 * 1024 - 2048);
};

struct DirectArgs {
    const void* x;
    std::int64_t row_stride;
    int rows, n, m;
    const void* table;
    std::uint8_t* y;
    float* scale;
    float norm, clip_over_qmax;
    int bits;
    CodeLayout layout;
    unsigned shift, mask;
};

__device__ __forceinline__ void load_5d(std::uint32_t shared, const CUtensorMap& map, int x, int y, int z, int u, int v,
                                        std::uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], "
        "[%7];"
        ::"r"(shared), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(u), "r"(v), "r"(barrier)
        : "memory");
}

// A flag in shared memory that one thread raises and others poll: atomic both, so that racecheck sees no race in it.
__device__ __forceinline__ void raise_flag(std::uint32_t address, int x) {
    asm volatile("{ .reg .b32 old; atom.release.cta.shared::cta.exch.b32 old, [%0], %1; }" ::"r"(address), "r"(x)
                 : "memory");
}

__device__ __forceinline__ int read_flag(std::uint32_t address) {
    int x;
    asm volatile("atom.acquire.cta.shared::cta.or.b32 %0, [%1], 0;" : "=r"(x) : "r"(address) : "memory");
    return x;
}

__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// a + sign * b on pairs of fp16, sign = +-1: one rounding.
__device__ __forceinline__ std::uint32_t add_signed(std::uint32_t a, std::uint32_t b, std::uint32_t sign) {
    std::uint32_t y;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(b), "r"(sign), "r"(a));
    return y;
}

template <class S, bool kSilu, typename Element>
struct Direct {
    static constexpr bool kInPlace = kSilu || S::T > 1 || !std::is_same_v<Element, __half>;
    static constexpr int kUps = kSilu ? S::kUps : 0, kRows = S::kSlots - kUps;  // slots; those for up come last

    struct Group {  // by turn parity: a warp may be a row ahead of one that still reads
        unsigned top[2][S::kWarps], peak[2][S::kWarps], products[2][S::kWarps];
    };
    struct Shared {
        Group groups[S::NG];
        std::uint64_t full[S::kSlots];
        int turn[S::kSlots];  // that the slot was last asked for
        std::uint64_t table_full;
    };

    static __device__ __forceinline__ void run(const DirectArgs& a, const CUtensorMap& map, std::uint8_t* dynamic,
                                               Shared& shared) {
        // From a reduction, so that it sits in a uniform register (transform.cuh).
        const int cta_warp = static_cast<int>(__reduce_max_sync(kFullWarp, threadIdx.x >> 5));
        const int group_index = cta_warp / S::kWarps, warp = cta_warp % S::kWarps, w = warp & 3, tile_h = warp >> 2;
        const int thread = threadIdx.x % S::kGroupThreads, lane = threadIdx.x & 31;
        const int barrier = 1 + group_index;
        Group& group = shared.groups[group_index];
        const std::uint32_t x_first = shared_address(dynamic), table = x_first + S::kSlots * S::kXBytes;
        const std::uint32_t full = shared_address(shared.full), table_full = shared_address(&shared.table_full);
        const std::uint32_t turns = shared_address(shared.turn);

        pdl_trigger();
        if (threadIdx.x == 0) {
            prefetch_map(map);
            for (int i = 0; i < S::kSlots; ++i) mbarrier_init(full + 8 * i, 1), shared.turn[i] = -1;
            mbarrier_init(table_full, 1);
            mbarrier_init_fence();
            mbarrier_expect(table_full, S::kTableBytes);  // no output of a kernel: no need to wait for the predecessor
            bulk_load(table, a.table, S::kTableBytes, table_full);
        }
        // Rows of X beyond m meet zeros of the table, but must be finite; the copies leave them alone.
        const int spare = (S::MP - a.m) * 8;
        const auto clear = [&](int slot, int i) {
            store_shared(x_first + slot * S::kXBytes + i / spare * S::kTileBytes + a.m * 128 + i % spare * 16,
                         {0, 0, 0, 0});
        };
        for (int slot = 0; slot < S::kSlots; ++slot)
            for (int i = threadIdx.x; i < S::T * spare; i += blockDim.x) clear(slot, i);
        __syncthreads();
        pdl_wait();

        // Row `turn` of this block (half 1: its up), to `slot`. Called by one thread.
        const auto copy = [&](int turn, int half, int slot) {
            const int row = blockIdx.x + turn * gridDim.x;
            if (row >= a.rows) return;
            mbarrier_expect(full + 8 * slot, 2 * a.n);
            raise_flag(turns + 4 * slot, turn);
#pragma unroll
            for (int h = 0; h < S::T; ++h)
                load_5d(x_first + slot * S::kXBytes + h * S::kTileBytes, map, 0, h, 0, half, row, full + 8 * slot);
        };
        // The parity alone would not do: where another group is late with the row that lies there, a slot may be two
        // phases back.
        const auto wait = [&](int turn, int slot, int phase) {
            if (elect_one())
                while (read_flag(turns + 4 * slot) != turn) {}
            __syncwarp();
            mbarrier_wait(full + 8 * slot, phase);
        };
        if (threadIdx.x == 0)
            for (int i = 0; i < kRows; ++i) {
                copy(i, 0, i);
                if (i < kUps) copy(i, 1, kRows + i);
            }

        std::uint32_t h16[4];
        h16_fragment<true>(lane, S::T == 1 ? 0x3000u : 0x2c00u, h16);  // +-1/8 or +-1/16 in fp16
        const std::uint32_t odd_sign = (w & 1) * 0x80008000u, sign = w >> 1 ? 0xbc00bc00u : 0x3c003c00u;
        const std::uint64_t b_first = b_descriptor(table, S::MP * 16);
        int turn = group_index, slot = turn, slot_parity = 0, up = turn, up_parity = 0, parity = 0;
        float factor = 1.0f;  // not 1: this row is being done again
        while (static_cast<int>(blockIdx.x + turn * gridDim.x) < a.rows) {
            const int row = blockIdx.x + turn * gridDim.x;
            const std::uint32_t x_row = x_first + slot * S::kXBytes;
            __half2 peak = __half2half2(__ushort_as_half(0));
            std::uint32_t products = 0;
            const int own = lane_id();  // read again for each row, it need not stay in a register
            wait(turn, slot, slot_parity);
            if (kInPlace && factor == 1.0f) {
                if constexpr (kSilu) wait(turn, kRows + up, up_parity);
                stage1(x_row, x_first + (kRows + up) * S::kXBytes, own, warp, a.m, peak, products);
                named_barrier(barrier, S::kGroupThreads);
                if (kSilu && thread == 0) copy(turn + kUps, 1, kRows + up);
            }
            // ---- fragments. ldmatrix: lanes 0-7 rows 0-7 of 16-byte chunk c, 8-15 of chunk c + 1, 16-31 rows 8-15;
            // columns 16 s on are at this ^ 32 s, those of the other half at this ^ 64.
            const std::uint32_t address = x_row + tile_h * S::kTileBytes + ((own & 7) + (own >> 4) * 8) * 128 +
                                          (((own >> 3 & 1) + (kInPlace ? 4 * (w >> 1) : 0) ^ (own & 7)) << 4);
            std::uint32_t h16_odd[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) h16_odd[i] = h16[i] ^ odd_sign;
            float acc[S::MP / 2];
            std::uint32_t fragments[S::kSteps][4];
#pragma unroll
            for (int step = 0; step < S::kSteps; ++step) {
                float lo[4] = {0.0f, 0.0f, 0.0f, 0.0f}, hi[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    std::uint32_t b[4];
                    ldmatrix4(b, (address ^ 32 * s) + step * 2048);
                    if constexpr (!kInPlace) {
                        std::uint32_t c[4];
                        ldmatrix4(c, (address ^ (32 * s + 64)) + step * 2048);
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            b[j] = add_signed(b[j], c[j], sign);
                            peak = __hmax2(peak, __habs2(*reinterpret_cast<const __half2*>(&b[j])));
                        }
                    }
                    mma16816(lo, s ? h16_odd : h16, b[0], b[1]);
                    mma16816(hi, s ? h16_odd : h16, b[2], b[3]);
                }
                fragments[step][0] = pack_half2(lo[0], lo[1]), fragments[step][1] = pack_half2(lo[2], lo[3]);
                fragments[step][2] = pack_half2(hi[0], hi[1]), fragments[step][3] = pack_half2(hi[2], hi[3]);
            }
            mbarrier_wait(table_full, 0);  // matters for the first row only
            wgmma_fence();
#pragma unroll
            for (int step = 0; step < S::kSteps; ++step)
                Wgmma<S::MP>::run(acc, fragments[step], b_first + step * (2 * S::MP * 16 >> 4), step > 0);
            wgmma_commit();
            const unsigned warp_peak = __reduce_max_sync(kFullWarp, largest_half<__half>(as_word(peak)));
            if (lane == 0) group.peak[parity][warp] = warp_peak;
            if constexpr (kSilu) {
                const unsigned warp_products = __reduce_max_sync(kFullWarp, largest_half<Element>(products));
                if (lane == 0) group.products[parity][warp] = warp_products;
            }
            wgmma_wait();

            float top0 = 0.0f, top1 = 0.0f;
#pragma unroll
            for (int i = 0; i < S::MP / 2; i += 2) {
                asm("max.NaN.f32 %0, %0, %1;" : "+f"(top0) : "f"(fabsf(acc[i])));
                asm("max.NaN.f32 %0, %0, %1;" : "+f"(top1) : "f"(fabsf(acc[i + 1])));
            }
            unsigned top = __reduce_max_sync(kFullWarp, max(abs_bits(top0), abs_bits(top1)));
            if (lane == 0) group.top[parity][warp] = top;
            named_barrier(barrier, S::kGroupThreads);  // X has been read, too
            const int mine = lane & (S::kWarps - 1);
            top = __reduce_max_sync(kFullWarp, group.top[parity][mine]);
            const float largest = __uint_as_float(__reduce_max_sync(kFullWarp, group.peak[parity][mine]));
            const float towers =
                kSilu ? __uint_as_float(__reduce_max_sync(kFullWarp, group.products[parity][mine])) : 0.0f;
            parity ^= 1;
            if (factor == 1.0f && leaves_range<kSilu, S::T>(largest, towers)) {
                factor = redo(a, row, x_row, lane, warp, group.top[parity], barrier);
                parity ^= 1;
                continue;
            }
            if (!S::kStaged && thread == 0) copy(turn + kRows, 0, slot);

            // ---- codes: this lane ends up with column 64 (T m + tile_h) + 16 w + 4 (lane % 4), m = lane / 4 + 8 j
            const float factor_inverse = 1.0f / factor;
            const RowQuantizer q =
                row_quantizer(__uint_as_float(top) * a.norm * factor_inverse, a.clip_over_qmax, a.bits, a.layout);
            if (thread == 0) a.scale[row] = q.scale;
            const CodeWords words(q, factor_inverse, a.norm);
            const int out = lane_id(), m_first = out >> 2, column = tile_h * 64 + 16 * w + 4 * (out & 3);
            std::uint8_t* y = a.y + static_cast<std::int64_t>(row) * a.n;
            // Lanes hold pieces of 4 bytes in 8 rows of 64 T: staged through X, they leave as whole lines.
            constexpr int kPitch = 64 * S::T + 16;  // 16: the 8 rows of a store hit different banks
#pragma unroll
            for (int j = 0; j < S::MP / 8; ++j) {
                const unsigned codes = words.of(&acc[4 * j], a.shift, a.mask);
                if constexpr (S::kStaged)
                    store_shared(x_row + (m_first + 8 * j) * kPitch + column, codes);  // rows beyond m too: they fit
                else if (m_first + 8 * j < a.m)
                    *reinterpret_cast<unsigned*>(y + (m_first + 8 * j) * 64 * S::T + column) = codes;
            }
            if constexpr (S::kStaged) {
                named_barrier(barrier, S::kGroupThreads);
                for (int i = thread; i < a.m * 4 * S::T; i += S::kGroupThreads)
                    reinterpret_cast<uint4*>(y)[i] =
                        load_shared(x_row + i / (4 * S::T) * kPitch + i % (4 * S::T) * 16);
                for (int i = thread; i < S::T * (S::MP - a.m) * 8; i += S::kGroupThreads) clear(slot, i);
                proxy_fence();
                named_barrier(barrier, S::kGroupThreads);
                if (thread == 0) copy(turn + kRows, 0, slot);
            }
            factor = 1.0f;
            turn += S::NG;
            slot += S::NG;
            if (slot >= kRows) slot -= kRows, slot_parity ^= 1;
            if constexpr (kSilu) {
                up += S::NG;
                if (up >= kUps) up -= kUps, up_parity ^= 1;
            }
        }
    }

    // A lane has chunks c and c + 4 of every tile of one row of X; 8 neighbouring lanes have rows r and r + 4, whose
    // chunks lie in different banks.
    static __device__ __forceinline__ int chunk_row(int lane) { return (lane >> 3) + (lane & 4); }

    static __device__ __forceinline__ std::uint32_t chunk_offset(int lane, int tile) {
        return (8 * tile + chunk_row(lane)) * 128 + (((lane & 3) ^ chunk_row(lane)) << 4);
    }

    static __device__ __forceinline__ void store_chunks(std::uint32_t address, const float (&p)[2 * S::T][8],
                                                        __half2& peak) {
#pragma unroll
        for (int k = 0; k < 2 * S::T; ++k) {
            std::uint32_t packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                packed[j] = pack_half2(p[k][2 * j], p[k][2 * j + 1]);
                peak = __hmax2(peak, __habs2(*reinterpret_cast<const __half2*>(&packed[j])));
            }
            store_shared((address ^ 64 * (k & 1)) + k / 2 * S::kTileBytes, packed);
        }
    }

    // Elementwise work and butterflies, in fp32 with one rounding, from `first` (and `second`: up) to `first`.
    static __device__ __forceinline__ void stage1(std::uint32_t first, std::uint32_t second, int lane, int warp, int m,
                                                  __half2& peak, std::uint32_t& products) {
#pragma unroll(S::T == 1 ? 2 : 4)
        for (int i = 0; i < (S::MP / 8 + S::kWarps - 1) / S::kWarps; ++i) {
            const int tile = warp + i * S::kWarps;
            if (8 * tile + chunk_row(lane) >= m) continue;
            const std::uint32_t offset = chunk_offset(lane, tile);
            float p[2 * S::T][8];
#pragma unroll
            for (int k = 0; k < 2 * S::T; ++k) {
                const std::uint32_t at = (offset ^ 64 * (k & 1)) + k / 2 * S::kTileBytes;
                const uint4 gate = load_shared(first + at), up = kSilu ? load_shared(second + at) : gate;
                fast_values<Element, kSilu>(gate, up, p[k], products);
            }
            butterflies(p);
            store_chunks(first + offset, p, peak);
        }
        proxy_fence();  // the copy engine is the next to write here
    }

    // Fills X from global memory, exactly but for a power of two, not 1, that brings the largest value to 256 at most (512
    // where a butterfly is still to come) and is returned.
    static __device__ __forceinline__ float redo(const DirectArgs& a, int row, std::uint32_t x_row, int lane, int warp,
                                                 unsigned* tops, int barrier) {
        const Element* source = static_cast<const Element*>(a.x) + row * a.row_stride;
        const auto for_each_tile = [&](auto&& use) {
#pragma unroll 1
            for (int tile = warp; 8 * tile < a.m; tile += S::kWarps) {
                const int m = 8 * tile + chunk_row(lane);
                if (m >= a.m) continue;
                float p[2 * S::T][8];
#pragma unroll
                for (int k = 0; k < 2 * S::T; ++k) {
                    const Element* chunk = source + m * 64 * S::T + k / 2 * 64 + (k & 1) * 32 + (lane & 3) * 8;
                    const uint4 gate = *reinterpret_cast<const uint4*>(chunk);
                    const uint4 up = kSilu ? *reinterpret_cast<const uint4*>(chunk + a.n) : gate;
                    exact_values<Element, kSilu>(gate, up, p[k]);
                }
                if constexpr (kInPlace) butterflies(p);
                use(tile, p);
            }
        };
        unsigned top = 0;
        for_each_tile([&](int, const float(&p)[2 * S::T][8]) {
#pragma unroll
            for (int k = 0; k < 2 * S::T; ++k)
#pragma unroll
                for (int j = 0; j < 8; ++j) top = max(top, abs_bits(p[k][j]));
        });
        top = __reduce_max_sync(kFullWarp, top);
        if (lane == 0) tops[warp] = top;
        named_barrier(barrier, S::kGroupThreads);
        // Half of it for the butterfly that may still be to come. Where that makes 1, half of that: 1 says that nothing has
        // been done, and the row would begin anew for ever.
        const float half = 0.5f * range_factor(__reduce_max_sync(kFullWarp, tops[lane & (S::kWarps - 1)]));
        const float factor = half == 1.0f ? 0.5f : half;
        __half2 peak = __half2half2(__ushort_as_half(0));
        for_each_tile([&](int tile, float(&p)[2 * S::T][8]) {
#pragma unroll
            for (int k = 0; k < 2 * S::T; ++k)
#pragma unroll
                for (int j = 0; j < 8; ++j) p[k][j] *= factor;
            store_chunks(x_row + chunk_offset(lane, tile), p, peak);
        });
        proxy_fence();
        named_barrier(barrier, S::kGroupThreads);
        return factor;
    }
};

template <class S, bool kSilu, typename Element>
__global__ void __launch_bounds__(S::kThreads, 1)
    direct_kernel(const __grid_constant__ DirectArgs a, const __grid_constant__ CUtensorMap map) {
    extern __shared__ __align__(1024) std::uint8_t dynamic[];
    __shared__ typename Direct<S, kSilu, Element>::Shared shared;
    Direct<S, kSilu, Element>::run(a, map, dynamic, shared);
}

template <class S>
cudaError_t launch_direct(const TransformArgs& t, bool silu, bool bfloat16, cudaStream_t stream) {
    const int blocks = std::min(t.rows, current_device().multiprocessors);
    const DirectArgs a{t.x, t.row_stride, t.rows, t.n, t.m, t.table, static_cast<std::uint8_t*>(t.y), t.scale, t.norm,
                       t.clip_over_qmax, t.bits, t.layout, t.shift, t.mask};
    CUtensorMap map;
    const auto size = [](auto x) { return static_cast<std::uint64_t>(x); };
    const std::uint64_t halves = silu ? 2 : 1, stride = t.rows > 1 ? size(t.row_stride) : halves * size(t.n);
    const cudaError_t status = make_tensor_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, t.x,
                                               {{64, 0, 64},
                                                {S::T, 128, 1},
                                                {size(t.m), 128 * S::T, static_cast<std::uint32_t>(t.m)},
                                                {halves, 2 * size(t.n), 1},
                                                {size(t.rows), 2 * stride, 1}},
                                               CU_TENSOR_MAP_SWIZZLE_128B);
    if (status != cudaSuccess) return status;
    const auto run = [&](auto* kernel) {
        return launch(kernel, dim3(blocks), dim3(S::kThreads), S::kSlots * S::kXBytes + S::kTableBytes, stream, a, map);
    };
    if (silu) return bfloat16 ? run(direct_kernel<S, true, __nv_bfloat16>) : run(direct_kernel<S, true, __half>);
    return bfloat16 ? run(direct_kernel<S, false, __nv_bfloat16>) : run(direct_kernel<S, false, __half>);
}

}  // namespace quarot::sm90
