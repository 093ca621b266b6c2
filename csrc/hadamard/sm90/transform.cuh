// [silu(gate) * up ->] H_b, H_m -> fp16/bf16, or absmax -> codes and scale: one pass over DRAM, tensor cores, sm_90a.
//
// The design (NOTES.md has the counts): each group of warpgroups works on one token row by itself, several groups an SM
// where shared memory allows, so that the copy, special-function, tensor and store phases of different rows overlap
// without specialised warps.
//   1. copy:    every warp keeps bulk copies of its own next tiles (8 rows of X) in flight, in a private ring of shared
//               memory: a slot is refilled by the warp that has just emptied it, so nobody waits for an empty slot.
//   2. stage 1: elementwise work in fp32; the top bits of b and bit 5 as fp32 butterflies; one rounding to fp16 into
//               X[T][m][64] (rows of 128 B, 16-byte chunks swizzled by the row).
//   3. H_32:    mma.m16n8k16, constants on the left, X on the right; the result *is* the A fragment of
//   4. H_m:     wgmma m64nNk16: A = (X H_b)^T from registers, B = H_m^T (+-1) in shared memory for the kernel's life.
//   5. output:  absmax from the accumulators, one barrier of the group, codes, transposition across lanes, stores.
// A row whose values leave the safe fp16 range after stage 1 is redone with a power-of-two factor.
#pragma once

#include "device/async_copy.cuh"
#include "device/launch.cuh"
#include "device/reduce.cuh"
#include "hadamard/sm90/row_range.cuh"
#include "hadamard/sm90/shape.cuh"
#include "hadamard/sm90/stage1.cuh"
#include "hadamard/sm90/transform.h"
#include "hadamard/sm90/wgmma.cuh"

namespace quarot::sm90 {

template <class S, bool kSilu, bool kCodes, typename Element>
struct Transform {
    static constexpr int kTensors = kSilu ? 2 : 1;
    static constexpr int kSlotBytes = S::kTileElements * 2 * kTensors;
    static constexpr int kSlots = S::kRingBytes / S::kWarps / kSlotBytes;  // of one warp
    static_assert(kSlots >= 1 && (kSlots & (kSlots - 1)) == 0, "slots are masked");
    static constexpr int kChunks = 2 * S::T;  // 16-byte chunks a lane has of a tile

    struct Group {  // small shared state of one group
        std::uint64_t full[S::kWarps][kSlots];
        unsigned top[S::kWarps];
        unsigned peak[2], products[2];  // by row parity: the largest |value| of X and |gate * up|, as fp32 bits
    };

    static __device__ __forceinline__ void run(const TransformArgs& a, std::uint8_t* dynamic, Group* groups,
                                               std::uint64_t* table_full) {
        // A reduction leaves its result in a uniform register: the compiler then knows that what is derived from it is
        // the same in all lanes, which makes issuing copies several times cheaper.
        const int cta_warp = static_cast<int>(__reduce_max_sync(kFullWarp, threadIdx.x >> 5));
        const int group_index = cta_warp / S::kWarps, warp = cta_warp % S::kWarps;
        const int thread = threadIdx.x % S::kGroupThreads, lane = threadIdx.x & 31;
        const int w = warp & 3, tile_h = (warp >> 2) % S::T, half = (warp >> 2) / S::T;
        const int barrier = 1 + group_index;
        Group& group = groups[group_index];
        const std::uint32_t table = shared_address(dynamic);
        const std::uint32_t x_shared = table + S::kTableBytes + group_index * (S::kXBytes + S::kRingBytes);
        const std::uint32_t ring = x_shared + S::kXBytes + warp * kSlots * kSlotBytes;
        const std::uint32_t full = shared_address(group.full[warp]);

        const int tiles = (a.m + 7) / 8;
        const int first_row = group_index * gridDim.x + blockIdx.x, row_step = gridDim.x * S::NG;
        const Element* x = static_cast<const Element*>(a.x);

        pdl_trigger();
        if (lane == 0)
            for (int i = 0; i < kSlots; ++i) mbarrier_init(full + 8 * i, 1);
        if (thread == 0)
            for (int i = 0; i < 2; ++i) group.peak[i] = group.products[i] = 0;
        if (threadIdx.x == 0) mbarrier_init(shared_address(table_full), 1);
        if (lane == 0) mbarrier_init_fence();
        if (threadIdx.x == 0) {  // the table is no output of a kernel: no need to wait for the predecessor
            mbarrier_expect(shared_address(table_full), S::kTableBytes);
            bulk_load(table, a.table, S::kTableBytes, shared_address(table_full));
        }
        // Rows of X beyond m meet zeros of the table, but must be finite.
        const auto clear_padding = [&] {
            for (int i = thread; i < S::T * (S::MP - a.m) * 8; i += S::kGroupThreads) {
                const int h = i / ((S::MP - a.m) * 8), rest = i % ((S::MP - a.m) * 8);
                store_shared(x_shared + (h * S::MP + a.m) * 128 + rest * 16, {0, 0, 0, 0});
            }
        };
        clear_padding();
        __syncthreads();
        pdl_wait();

        // Copies: tile `copy_tile` of row `copy_row` is the next of this warp's stream. Called by the whole warp.
        int copy_row = first_row, copy_tile = warp;
        const auto copy_next = [&](int slot) {
            if (copy_row < a.rows && copy_tile < tiles) {
                const int begin = copy_tile * S::kTileElements;
                const int bytes = 2 * min(S::kTileElements, a.n - begin);
                const Element* source = x + copy_row * a.row_stride + begin;
                const std::uint32_t barrier_address = full + 8 * slot, target = ring + slot * kSlotBytes;
                if (elect_one()) {
                    mbarrier_expect(barrier_address, bytes * kTensors);
                    bulk_load(target, source, bytes, barrier_address);
                    if constexpr (kSilu) bulk_load(target + S::kTileElements * 2, source + a.n, bytes, barrier_address);
                }
            }
            copy_tile += S::kWarps;
            if (copy_tile >= tiles) copy_tile = warp, copy_row += row_step;
        };
        for (int i = 0; i < kSlots; ++i) copy_next(i);

        std::uint32_t h16[4];
        h16_fragment<kCodes>(lane, S::T == 1 ? 0x3000u : 0x2c00u, h16);  // +-1/8 or +-1/16 in fp16
        const std::uint32_t odd_sign = (w & 1) * 0x80008000u;
        const std::uint64_t b_first = b_descriptor(table + half * S::N * 16, S::MP * 16);

        int turn = 0, parity = 0;  // turn: tiles that this warp has taken
        for (int row = first_row; row < a.rows; row += row_step, parity ^= 1) {
            // ---- stage 1: input -> X. This lane has, of row 8 tile + lane / 4, chunks c = lane % 4 and c + 4 of each
            // 64 columns. Odd rows take c + 4 first (bank conflicts); their differences come out negated.
            const int own = lane_id();  // read again for each row: what follows need not stay in registers
            const int chunk_m = own >> 2, chunk_c = own & 3;
            const std::uint32_t negate = (chunk_m & 1) * 0x80008000u;
            const int first_chunk = (chunk_c + 4 * (chunk_m & 1)) * 16;
            const std::uint32_t x_lane = x_shared + chunk_m * 128;
            const auto store_chunks = [&](int tile, const float(&p)[kChunks][8], __half2& peak) {
#pragma unroll
                for (int i = 0; i < kChunks; ++i) {
                    std::uint32_t packed[4];
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        packed[j] = pack_half2(p[i][2 * j], p[i][2 * j + 1]);
                        peak = __hmax2(peak, __habs2(*reinterpret_cast<const __half2*>(&packed[j])));
                        if (i & 1) packed[j] ^= negate;
                    }
                    const int chunk = swizzle(chunk_m, chunk_c + 4 * (i & 1));
                    store_shared(x_lane + (i / 2) * S::MP * 128 + tile * 1024 + chunk, packed);
                }
            };
            __half2 peak = __half2half2(__ushort_as_half(0));
            std::uint32_t products = 0;
            if constexpr (kCodes && S::kStaged) clear_padding();  // codes of the row before lie there
            for (int tile = warp; tile < tiles; tile += S::kWarps, ++turn) {
                const int slot = turn & (kSlots - 1);
                mbarrier_wait(full + 8 * slot, (turn / kSlots) & 1);
                if (8 * tile + chunk_m < a.m) {
                    const std::uint32_t source = ring + slot * kSlotBytes + chunk_m * 128 * S::T;
                    float p[kChunks][8];
#pragma unroll
                    for (int i = 0; i < kChunks; ++i) {
                        const std::uint32_t chunk = source + (i / 2) * 128 + (first_chunk ^ 64 * (i & 1));
                        const uint4 first = load_shared(chunk);
                        uint4 second = first;
                        if constexpr (kSilu) second = load_shared(chunk + S::kTileElements * 2);
                        fast_values<Element, kSilu>(first, second, p[i], products);
                    }
                    butterflies(p);
                    store_chunks(tile, p, peak);
                }
                __syncwarp();  // all lanes have used what they loaded
                copy_next(slot);
            }
            const unsigned row_peak = __reduce_max_sync(kFullWarp, largest_half<__half>(as_word(peak)));
            if (lane == 0) atomicMax(&group.peak[parity], row_peak);
            if constexpr (kSilu) {
                const unsigned row_products = __reduce_max_sync(kFullWarp, largest_half<Element>(products));
                if (lane == 0) atomicMax(&group.products[parity], row_products);
            }
            named_barrier(barrier, S::kGroupThreads);
            float factor_inverse = 1.0f;
            const float largest = __uint_as_float(group.peak[parity]);
            const bool rescale = leaves_range<kSilu, S::T>(largest, __uint_as_float(group.products[parity]));
            if (thread == 0) group.peak[parity ^ 1] = group.products[parity ^ 1] = 0;
            if (rescale) {
                // Once more from global memory, times a power of two that brings the largest value to 256 .. 512.
                const Element* source = x + row * a.row_stride;
                const auto for_each_tile = [&](auto&& use) {
#pragma unroll 1
                    for (int tile = warp; tile < tiles; tile += S::kWarps) {
                        if (8 * tile + chunk_m >= a.m) continue;
                        const Element* mine = source + (8 * tile + chunk_m) * 64 * S::T;
                        float p[kChunks][8];
#pragma unroll
                        for (int i = 0; i < kChunks; ++i) {
                            const Element* chunk = mine + (i / 2) * 64 + (first_chunk ^ 64 * (i & 1)) / 2;
                            const uint4 first = *reinterpret_cast<const uint4*>(chunk);
                            uint4 second = first;
                            if constexpr (kSilu) second = *reinterpret_cast<const uint4*>(chunk + a.n);
                            exact_values<Element, kSilu>(first, second, p[i]);
                        }
                        butterflies(p);
                        use(tile, p);
                    }
                };
                unsigned top = 0;
                for_each_tile([&](int, const float(&p)[kChunks][8]) {
#pragma unroll
                    for (int i = 0; i < kChunks; ++i)
#pragma unroll
                        for (int j = 0; j < 8; ++j) top = max(top, abs_bits(p[i][j]));
                });
                top = __reduce_max_sync(kFullWarp, top);
                if (lane == 0) group.top[warp] = top;
                named_barrier(barrier, S::kGroupThreads);
                top = __reduce_max_sync(kFullWarp, lane < S::kWarps ? group.top[lane] : 0u);
                const float factor = range_factor(top);
                factor_inverse = 1.0f / factor;
                for_each_tile([&](int tile, float(&p)[kChunks][8]) {
#pragma unroll
                    for (int i = 0; i < kChunks; ++i)
#pragma unroll
                        for (int j = 0; j < 8; ++j) p[i][j] *= factor;
                    store_chunks(tile, p, peak);
                });
                named_barrier(barrier, S::kGroupThreads);
            }

            // ---- H_32: A = (X H_b)^T, 64 output columns by m; then H_m. In kBatches along m, to save registers.
            // ldmatrix: lanes 0-7 rows 0-7 of chunk 0, 8-15 of chunk 1, 16-31 rows 8-15; step s is at this ^ 32 s.
            const std::uint32_t fragment_address = x_shared + (tile_h * S::MP + (own & 7) + (own >> 4) * 8) * 128 +
                                                   swizzle(own & 7, 4 * (w >> 1) + (own >> 3 & 1));
            std::uint32_t h16_odd[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) h16_odd[i] = h16[i] ^ odd_sign;
            float acc[S::N / 2];
#pragma unroll
            for (int batch = 0; batch < S::kBatches; ++batch) {
                constexpr int kBatchSteps = (S::kSteps + S::kBatches - 1) / S::kBatches;
                std::uint32_t fragments[kBatchSteps][4];
#pragma unroll
                for (int i = 0; i < kBatchSteps; ++i) {
                    const int step = batch * kBatchSteps + i;
                    if (step >= S::kSteps) break;
                    float lo[4] = {0.0f, 0.0f, 0.0f, 0.0f}, hi[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    std::uint32_t b[4];
                    ldmatrix4(b, fragment_address + step * 2048);
                    mma16816(lo, h16, b[0], b[1]);
                    mma16816(hi, h16, b[2], b[3]);
                    ldmatrix4(b, (fragment_address ^ 32) + step * 2048);
                    mma16816(lo, h16_odd, b[0], b[1]);
                    mma16816(hi, h16_odd, b[2], b[3]);
                    fragments[i][0] = pack_half2(lo[0], lo[1]), fragments[i][1] = pack_half2(lo[2], lo[3]);
                    fragments[i][2] = pack_half2(hi[0], hi[1]), fragments[i][3] = pack_half2(hi[2], hi[3]);
                }
                if (!kCodes && batch == S::kBatches - 1) named_barrier(barrier, S::kGroupThreads);  // X is free
                mbarrier_wait(shared_address(table_full), 0);  // matters for the first row only
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < kBatchSteps; ++i) {
                    const int step = batch * kBatchSteps + i;
                    if (step >= S::kSteps) break;
                    Wgmma<S::N>::run(acc, fragments[i], b_first + step * (2 * S::MP * 16 >> 4), step > 0);
                }
                wgmma_commit();
                wgmma_wait();
            }

            // ---- output: this lane ends up with column 64 (T m + tile_h) + 16 w + 4 (lane % 4), m = lane / 4 + 8 j
            const int out_lane = lane_id(), m_first = half * S::N + (out_lane >> 2);
            const int column = (m_first * S::T + tile_h) * 64 + 16 * w + 4 * (out_lane & 3);
            if constexpr (kCodes) {
                float top0 = 0.0f, top1 = 0.0f;
#pragma unroll
                for (int i = 0; i < S::N / 2; i += 2) {
                    asm("max.NaN.f32 %0, %0, %1;" : "+f"(top0) : "f"(fabsf(acc[i])));
                    asm("max.NaN.f32 %0, %0, %1;" : "+f"(top1) : "f"(fabsf(acc[i + 1])));
                }
                unsigned top = __reduce_max_sync(kFullWarp, max(abs_bits(top0), abs_bits(top1)));
                if (lane == 0) group.top[warp] = top;
                named_barrier(barrier, S::kGroupThreads);  // X has been read, too
                top = __reduce_max_sync(kFullWarp, lane < S::kWarps ? group.top[lane] : 0u);
                const RowQuantizer q =
                    row_quantizer(__uint_as_float(top) * a.norm * factor_inverse, a.clip_over_qmax, a.bits, a.layout);
                if (thread == 0) a.scale[row] = q.scale;
                const CodeWords words(q, factor_inverse, a.norm);
                std::uint8_t* y = static_cast<std::uint8_t*>(a.y) + static_cast<std::int64_t>(row) * a.n;
                // Lanes hold pieces of 4 bytes in 8 rows of 64 T: staged through X, they leave as whole lines.
                constexpr int kPitch = 64 * S::T + 16;  // 16: the 8 rows of a store hit different banks
                const std::uint32_t staged = x_shared + m_first * kPitch + tile_h * 64 + 16 * w + 4 * (out_lane & 3);
#pragma unroll
                for (int j = 0; j < S::N / 8; ++j) {
                    const unsigned codes = words.of(&acc[4 * j], a.shift, a.mask);
                    if constexpr (S::kStaged)
                        store_shared(staged + j * 8 * kPitch, codes);  // rows beyond m as well: they fit
                    else if (m_first + 8 * j < a.m)
                        *reinterpret_cast<unsigned*>(y + column + j * 512 * S::T) = codes;
                }
                if constexpr (S::kStaged) {
                    named_barrier(barrier, S::kGroupThreads);
                    for (int i = thread; i < a.m * 4 * S::T; i += S::kGroupThreads)
                        reinterpret_cast<uint4*>(y)[i] =
                            load_shared(x_shared + i / (4 * S::T) * kPitch + i % (4 * S::T) * 16);
                    named_barrier(barrier, S::kGroupThreads);  // X is free again
                }
            } else {
                const float norm = a.norm * factor_inverse;
                Element* y = static_cast<Element*>(a.y) + static_cast<std::int64_t>(row) * a.n + column;
#pragma unroll
                for (int j = 0; j < S::N / 8; ++j) {
                    uint2 out;
                    out.x = transpose8x8(pack2<Element>(acc[4 * j] * norm, acc[4 * j + 1] * norm));
                    out.y = transpose8x8(pack2<Element>(acc[4 * j + 2] * norm, acc[4 * j + 3] * norm));
                    if (m_first + 8 * j < a.m) *reinterpret_cast<uint2*>(y + j * 512 * S::T) = out;
                }
            }
        }
    }
};

template <class S, bool kSilu, bool kCodes, typename Element>
__global__ void __launch_bounds__(S::kThreads, 1) transform_kernel(const __grid_constant__ TransformArgs a) {
    using Kernel = Transform<S, kSilu, kCodes, Element>;
    extern __shared__ __align__(1024) std::uint8_t dynamic[];
    __shared__ typename Kernel::Group groups[S::NG];
    __shared__ std::uint64_t table_full;
    Kernel::run(a, dynamic, groups, &table_full);
}

}  // namespace quarot::sm90
