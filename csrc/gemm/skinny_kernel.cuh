// The kernel behind skinny.h. Weights go from global memory straight into mma.sync operands; nothing but int32 partial
// sums, the activations and what weights are asked for early (weight_ring.cuh) passes through shared memory. See NOTES.md for
// the design and the measurements.
#pragma once

#include "device/made_by_now.cuh"
#include "gemm/skinny_input.cuh"
#include "gemm/weight_ring.cuh"

#include <type_traits>

namespace quarot::skinny {

/// Blocks own equal shares of the 16-row strips; blockIdx.y is the token block.
///
/// A warp takes every WARPS-th chunk of K. It copies the chunk's activations to its own corner of shared memory (or the
/// block makes them there: Input), turns them into register fragments once, and streams the chunk's weights of all
/// strips past them: no block-wide barrier until the end.
///
/// With a made input, most instructions run once, and each line of them comes from L2 (NOTES.md): so no more of them than it
/// takes, above all between the wait and the last store.
template <class Weights, class Input, int TOKEN_TILES, int UNITS, int WARPS, int BLOCKS>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    skinny_kernel(SkinnyProblem const p, typename Input::Arguments const input, Geometry const g) {
    using Layout = SharedLayout<Weights, Input, TOKEN_TILES, UNITS>;
    constexpr int kTokens = Layout::kTokens, kThreads = WARPS * 32;
    extern __shared__ __align__(128) char shared[];
    int const code_bytes = Input::template code_bytes<Layout, WARPS>(Input::kOneRow ? 1 : p.m);
    int* const acc = reinterpret_cast<int*>(shared + code_bytes);  // [strips_max][kTokens, or 1][kAccStride]
    float* const channel_scale = reinterpret_cast<float*>(shared + code_bytes + Layout::sums(g.strips_max));
    float* const channel_bias = channel_scale + g.strips_max * 16;
    float* const token_scale = channel_bias + g.strips_max * 16;
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    int const owner = blockIdx.x;
    int const strip_begin = owner * g.strips_each + min(owner, g.strips_over);
    int const strip_count = g.strips_each + (owner < g.strips_over);
    int unit = warp * UNITS;                    // this warp's next chunk
    int const atoms = int(unsigned(p.k) / 32);  // 32-wide, of K
    int const token_begin = Input::kOneRow ? 0 : blockIdx.y * kTokens;
    int const tokens = Input::kOneRow ? 1 : min(kTokens, p.m - token_begin);

    constexpr bool kRing = Input::kMade && kBulkCopies;
    uint32_t w[UNITS][Weights::kRegisters];
    char const* item;  // where this lane's next weights start
    int item_atoms;    // how many of them exist: none past the end, fewer in the last chunk
    int item_row8;     // from a lane's first row to its second (int8 rows only)
    auto aim = [&](int strip, int first_unit) {
        int const s = strip_begin + strip;
        item = Weights::lane_pointer(p.weight, s, p.k, p.n, lane) + first_unit * Weights::kUnitBytes;
        item_atoms = first_unit < g.units ? atoms - 2 * first_unit : 0;
        item_row8 = s * 16 + lane / 4 + 8 < p.n ? 8 * p.k : 0;
    };
    // Ahead of the wait, as weights are constant, and of everything else: DRAM is idle until then.
    aim(0, unit);
    if (Input::kMade && __builtin_expect(item_atoms >= 2 * UNITS, 1)) {
        if constexpr (Input::kMade) Weights::template load_whole<UNITS>(w, item);
    } else {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) Weights::load(w[u], item, u, item_atoms, item_row8);
    }
    uint32_t const first_tile = uint32_t(__cvta_generic_to_shared(shared));
    std::conditional_t<kRing, WeightRing<Weights, UNITS, WARPS>, NoRing> ring(first_tile + g.ring, g.ring_slots, p,
                                                                              strip_begin, strip_count, atoms);

    int const width = strip_count * 16;
    constexpr int kUnroll = Input::kMade ? 1 : 4;
#pragma unroll kUnroll
    for (int i = threadIdx.x; i < g.strips_max * Layout::kStripSums; i += kThreads) acc[i] = 0;
    using Output = OneOutput<typename Input::Output>;
    [[maybe_unused]] Output output(p, Input::kOneRow && threadIdx.x < width ? strip_begin * 16 + threadIdx.x : p.n);
    if constexpr (!Input::kOneRow)  // early, so that the epilogue need not wait for them
        for (int i = threadIdx.x; i < width && strip_begin * 16 + i < p.n; i += kThreads) {
            copy_4_bytes(channel_scale + i, p.weight_scale + strip_begin * 16 + i);
            if (p.bias != nullptr) copy_4_bytes(channel_bias + i, p.bias + strip_begin * 16 + i);
        }
    char* const input_shared = shared + Layout::total(code_bytes, g.strips_max);
    typename Input::Early early;
    if constexpr (Input::kMade) early = Input::template begin<WARPS>(input, tokens, input_shared);
    __syncthreads();  // sums are zero

    wait_for_previous_kernel();
    let_next_kernel_start();
    uint32_t const tile = first_tile + warp * Layout::kTileBytes;
    if constexpr (Input::kMade)
        Input::template make<Layout, WARPS>(input, early, tokens, shared, token_scale, input_shared,
                                            [&] {
                                                ring.fill();
                                                if constexpr (Input::kOneRow && Input::kAdds) output.load_residual(p);
                                            });
    else if (threadIdx.x < tokens)
        copy_4_bytes(token_scale + threadIdx.x, p.row_scale + token_begin + threadIdx.x);

    char const* const codes = static_cast<char const*>(p.codes) + size_t(token_begin) * p.k;
    auto fetch = [&](int first_unit) {  // the chunk's activations, 16 bytes a lane
        constexpr int kVectors = UNITS * kUnit / 16, kRows = 32 / kVectors;
        int const vector = lane % kVectors, column = first_unit * kUnit + vector * 16;
#pragma unroll
        for (int row = lane / kVectors; row < kTokens; row += kRows)
            if (row < tokens && column < p.k)
                copy_16_bytes_l1(tile + row * Layout::kRowBytes + vector * 16, codes + size_t(row) * p.k + column);
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    if (!Input::kMade && unit < g.units) fetch(unit);
    while (unit < g.units) {
        uint32_t b[TOKEN_TILES][UNITS][4];
        if constexpr (!Input::kMade) asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncwarp();
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; ++t) {  // tokens past the end read row 0; their sums are never stored
            int const row = t * 8 + Weights::activation_row(lane);
            uint32_t const chunk =
                Input::kMade ? first_tile + unit / UNITS * Input::template chunk_stride<Layout>() : tile;
            uint32_t const address = Weights::activation_address(chunk, row < tokens ? row : 0,
                                                                 Input::template row_stride<Layout, WARPS>(), lane);
#pragma unroll
            for (int u = 0; u < UNITS; ++u) Weights::activations(b[t][u], address + Input::unit_offset(u));
        }
        __syncwarp();
        int const next_unit = unit + WARPS * UNITS;
        if (!Input::kMade && next_unit < g.units) fetch(next_unit);  // the copies land while this chunk is multiplied

#pragma unroll 1
        for (int strip = 0; strip < strip_count; ++strip) {
            if constexpr (kRing) {
                if (strip > 0 || unit >= WARPS * UNITS) ring.take(w, atoms - 2 * unit);  // else the first item
            } else if (strip + 1 < strip_count) {
                aim(strip + 1, unit);
            } else {
                aim(0, next_unit);
            }
            constexpr int kChains = Input::kOneRow ? 2 : 1;  // products that do not wait for one another
            int c[kChains][TOKEN_TILES][4] = {};
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                uint32_t a[2][4];
                Weights::fragment(a[0], w[u], 0);
                Weights::fragment(a[1], w[u], 1);
                if (!kRing) Weights::load(w[u], item, u, item_atoms, item_row8);
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; ++t) {
                    mma(c[0][t], a[0], b[t][u][0], b[t][u][1]);
                    mma(c[kChains - 1][t], a[1], b[t][u][2], b[t][u][3]);
                }
            }
            // Integers: the order of these adds cannot change the result.
            if constexpr (Input::kOneRow) {
                int* const sum = acc + strip * Layout::kStripSums + lane / 4;
                if (lane % 4 != 0) continue;  // other tokens
                atomicAdd(sum, c[0][0][0] + c[1][0][0]);
                atomicAdd(sum + 8, c[0][0][2] + c[1][0][2]);
            } else {
                int* const sum = acc + strip * Layout::kStripSums + (lane % 4) * 2 * kAccStride + lane / 4;
#pragma unroll
                for (int t = 0; t < TOKEN_TILES; ++t) {
                    if (t * 8 >= tokens) break;
                    atomicAdd(sum + t * 8 * kAccStride, c[0][t][0]);
                    atomicAdd(sum + (t * 8 + 1) * kAccStride, c[0][t][1]);
                    atomicAdd(sum + t * 8 * kAccStride + 8, c[0][t][2]);
                    atomicAdd(sum + (t * 8 + 1) * kAccStride + 8, c[0][t][3]);
                }
            }
        }
        if constexpr (Input::kOneChunk && !kBulkCopies) break;  // said, so that Ampere and Ada keep nothing for another one
        unit = next_unit;
    }

    if constexpr (!Input::kOneRow) asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    auto sum_of = [&](int token, unsigned row) {
        return __fmul_rn(float(acc[row / 16 * Layout::kStripSums + token * kAccStride + row % 16]), Weights::kMultiplier);
    };
    if constexpr (Input::kOneRow) {
        output.store(p, sum_of(0, threadIdx.x), token_scale[0]);
#pragma unroll 1
        for (int row = threadIdx.x + kThreads; row < width; row += kThreads) {
            Output more(p, strip_begin * 16 + row);
            if constexpr (Input::kAdds) more.load_residual(p);
            more.store(p, sum_of(0, row), token_scale[0]);
        }
    } else {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900  // there are no registers for four times this with 64 of them
#pragma unroll 1
#endif
        for (int i = threadIdx.x; i < width * tokens; i += kThreads) {
            int const token = i / width, row = i - token * width, n = strip_begin * 16 + row;
            if (n >= p.n) continue;
            float value = __fmul_rn(__fmul_rn(sum_of(token, row), token_scale[token]), channel_scale[row]);
            if (p.bias != nullptr) value = __fadd_rn(value, channel_bias[row]);
            if constexpr (Input::kAdds)
                if (p.residual != nullptr) {
                    using T = typename Input::Output;
                    T const other = static_cast<T const*>(p.residual)[token * p.residual_stride + n];
                    value = __fadd_rn(to_float(static_cast<T>(value)), to_float(other));
                }
            store(p.out, size_t(token_begin + token) * p.ldd + n, value, p.type);
        }
    }
}

}  // namespace quarot::skinny
