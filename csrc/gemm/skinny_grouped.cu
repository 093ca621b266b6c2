// The few-token kernel with one weight scale per group of K (any multiple of 32), int4 tiles and int8 rows alike.
//
// Group sums are exact int32; they are scaled and added in float32 in the order of the groups, whatever the split of
// work, so the result is the reference's bit for bit. Each group has its own accumulator in shared memory; K is walked
// in phases of as many groups as fit, and after a phase every output adds its groups in order.
#include "gemm/skinny_formats.h"
#include "gemm/skinny_launch.cuh"

namespace quarot {
namespace skinny {
namespace {

constexpr int kItemUnits = 2;  // one work item: up to 128 of K, never across a group

struct GroupGeometry {
    uint64_t strip_step;  // as in Geometry
    int strips_max;       // most strips any block owns
    int phase_groups;     // groups whose accumulators and activations fit at once
    int row_bytes;        // shared-memory row length of the activations
};

/// int4: two atoms are loaded one by one, so that a group may end between them.
__device__ __forceinline__ void load_atoms(uint32_t (&r)[4], Int4Tiles, char const* weight, int atom, int count, int) {
    r[0] = r[1] = r[2] = r[3] = 0;
    if (count > 0) Int4Tiles::load_8(r[0], r[1], weight + size_t(atom) * 256);
    if (count > 1) Int4Tiles::load_8(r[2], r[3], weight + size_t(atom + 1) * 256);
}
__device__ __forceinline__ void load_atoms(uint32_t (&r)[8], Int8Rows, char const* weight, int atom, int count,
                                           int row8) {
    Int8Rows::load(r, weight + size_t(atom) * 32, 0, count, row8);
}

template <class Weights, int TOKEN_TILES, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, 2) grouped_kernel(SkinnyProblem const p, GroupGeometry const g) {
    constexpr int kTokens = TOKEN_TILES * 8, kThreads = WARPS * 32;
    extern __shared__ __align__(128) int shared[];
    int const acc_words = g.strips_max * g.phase_groups * kTokens * kAccStride;
    int* const acc = shared;  // [strips][groups of the phase][kTokens][kAccStride]
    float* const total = reinterpret_cast<float*>(shared + acc_words);  // [strips][kTokens][16]
    float* const scales = total + g.strips_max * kTokens * 16;          // [strips * 16][scale_stride]
    int const scale_stride = g.phase_groups | 1;                        // odd: 16 channels read from 16 banks
    char* const codes = reinterpret_cast<char*>(scales + g.strips_max * 16 * scale_stride);
    uint32_t const codes_address = uint32_t(__cvta_generic_to_shared(codes));
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int const strip_begin = int(blockIdx.x * g.strip_step >> 32);
    int const strip_count = int((blockIdx.x + 1) * g.strip_step >> 32) - strip_begin;
    int const token_begin = blockIdx.y * kTokens;
    int const tokens = min(kTokens, p.m - token_begin);
    int const group_atoms = p.group_size / 32;
    int const pieces = (group_atoms + 2 * kItemUnits - 1) / (2 * kItemUnits);  // work items of one (strip, group)

    // Weights of an item (strip, group of the phase, piece of the group), loaded while the item before is multiplied.
    uint32_t w[kItemUnits][Weights::kRegisters];
    auto fetch = [&](int item, int first, int count) {
        bool const valid = item < strip_count * count * pieces;
        int const piece = item % pieces, group = item / pieces % count, strip = item / pieces / count;
        int const atoms = valid ? group_atoms - piece * 2 * kItemUnits : 0;
        int const s = strip_begin + (valid ? strip : 0);
        char const* weight = Weights::lane_pointer(p.weight, s, p.k, p.n, lane);
        int const row8 = s * 16 + lane / 4 + 8 < p.n ? 8 * p.k : 0;
        int const atom = (first + group) * group_atoms + piece * 2 * kItemUnits;
#pragma unroll
        for (int u = 0; u < kItemUnits; ++u) load_atoms(w[u], Weights{}, weight, atom + 2 * u, atoms - 2 * u, row8);
    };
    fetch(warp, 0, min(g.phase_groups, p.groups));  // ahead of the wait: weights are constant, and so are their scales

    for (int i = threadIdx.x; i < strip_count * kTokens * 16; i += kThreads) total[i] = 0.0f;
    for (int first = 0; first < p.groups; first += g.phase_groups) {
        int const count = min(g.phase_groups, p.groups - first);
        int const vectors = count * p.group_size / 16;
        for (int i = threadIdx.x; i < acc_words; i += kThreads) acc[i] = 0;
        for (int row = warp; row < strip_count * 16; row += WARPS) {
            int const n = min(strip_begin * 16 + row, p.n - 1);
            for (int group = lane; group < count; group += 32)
                copy_4_bytes(scales + row * scale_stride + group, p.weight_scale + size_t(n) * p.groups + first + group);
        }
        if (first == 0) {
            wait_for_previous_kernel();
            let_next_kernel_start();
        }
        char const* source =
            static_cast<char const*>(p.codes) + size_t(token_begin) * p.k + size_t(first) * p.group_size;
        for (int row = warp; row < tokens; row += WARPS)
            for (int v = lane; v < vectors; v += 32)
                copy_16_bytes(codes_address + row * g.row_bytes + v * 16, source + size_t(row) * p.k + v * 16);
        asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
        __syncthreads();

        for (int item = warp; item < strip_count * count * pieces; item += WARPS) {
            int const piece = item % pieces, group = item / pieces % count, strip = item / pieces / count;
            int const atom = group * group_atoms + piece * 2 * kItemUnits;  // of the phase
            uint32_t a[kItemUnits][2][4];
#pragma unroll
            for (int u = 0; u < kItemUnits; ++u)
#pragma unroll
                for (int half = 0; half < 2; ++half) Weights::fragment(a[u][half], w[u], half);
            if (item + WARPS < strip_count * count * pieces)
                fetch(item + WARPS, first, count);
            else if (first + count < p.groups)
                fetch(warp, first + count, min(g.phase_groups, p.groups - first - count));
            int* const sum =
                acc + (strip * g.phase_groups + group) * kTokens * kAccStride + lane % 4 * 2 * kAccStride + lane / 4;
#pragma unroll
            for (int t = 0; t < TOKEN_TILES; ++t) {
                int const row = t * 8 + Weights::activation_row(lane);
                uint32_t const address =
                    Weights::activation_address(codes_address, row < tokens ? row : 0, g.row_bytes, lane) + atom * 32;
                int c[4] = {};
#pragma unroll
                for (int u = 0; u < kItemUnits; ++u) {
                    uint32_t b[4];
                    Weights::activations(b, address + u * kUnit);  // past the end of the group the weights are zero
                    mma(c, a[u][0], b[0], b[1]);
                    mma(c, a[u][1], b[2], b[3]);
                }
                if (t * 8 >= tokens) continue;
                atomicAdd(sum + t * 8 * kAccStride, c[0]);
                atomicAdd(sum + (t * 8 + 1) * kAccStride, c[1]);
                atomicAdd(sum + t * 8 * kAccStride + 8, c[2]);
                atomicAdd(sum + (t * 8 + 1) * kAccStride + 8, c[3]);
            }
        }
        __syncthreads();

        for (int i = threadIdx.x; i < strip_count * 16 * tokens; i += kThreads) {
            int const row = i % 16, strip = i / 16 % strip_count, token = i / 16 / strip_count;
            float const* const scale = scales + (strip * 16 + row) * scale_stride;
            int const* const part = acc + (strip * g.phase_groups * kTokens + token) * kAccStride + row;
            float& entry = total[(strip * kTokens + token) * 16 + row];
            float sum = entry;
#pragma unroll 8
            for (int group = 0; group < count; ++group) {
                float const value = __fmul_rn(float(part[group * kTokens * kAccStride]), Weights::kMultiplier);
                sum = __fadd_rn(sum, __fmul_rn(value, scale[group]));
            }
            entry = sum;
        }
        __syncthreads();
    }

    int const width = strip_count * 16;
    for (int i = threadIdx.x; i < width * tokens; i += kThreads) {
        int const token = i / width, row = i % width;
        int const n = strip_begin * 16 + row;
        if (n >= p.n) continue;
        float value = __fmul_rn(total[(row / 16 * kTokens + token) * 16 + row % 16], p.row_scale[token_begin + token]);
        if (p.bias != nullptr) value = __fadd_rn(value, p.bias[n]);
        store(p.out, size_t(token_begin + token) * p.ldd + n, value, p.type);
    }
}

template <class Weights, int TOKEN_TILES>
cudaError_t run_grouped(SkinnyProblem const& p) {
    constexpr int kTokens = TOKEN_TILES * 8, kWarps = 16;
    Device const& device = current_device();
    GroupGeometry g;
    int const strips = (p.n + 15) / 16;
    int const acc_bytes = kTokens * kAccStride * 4, total_bytes = kTokens * 16 * 4;
    int const rows = std::min(kTokens, p.m);
    int const slack = 2 * kItemUnits * 32;
    auto bytes = [&](int strips_here, int groups_here) {
        return strips_here * (groups_here * acc_bytes + (groups_here | 1) * 64 + total_bytes) +
               rows * Weights::kRowPad((groups_here * p.group_size + 63) / 64 * 64) + slack;
    };
    // Two blocks an SM if a useful share of the groups fits, else one; then as many strips a block as an even split
    // gives.
    int const half = device.shared_per_multiprocessor / 2 - 1024;
    int const budget = bytes(1, std::min(p.groups, 8)) <= half ? half : device.shared_per_block;
    int owners = std::min(strips, device.multiprocessors * (budget == half ? 2 : 1));
    while ((strips + owners - 1) / owners > 1 && bytes((strips + owners - 1) / owners, std::min(p.groups, 8)) > budget)
        owners = std::min(strips, owners * 2);
    g.strips_max = (strips + owners - 1) / owners;
    g.strip_step = ((uint64_t(strips) << 32) + owners - 1) / owners;
    g.phase_groups = p.groups;
    while (g.phase_groups > 1 && bytes(g.strips_max, g.phase_groups) > budget)
        g.phase_groups = (g.phase_groups + 1) / 2;
    if (bytes(g.strips_max, g.phase_groups) > budget) return cudaErrorInvalidValue;
    g.row_bytes = Weights::kRowPad((g.phase_groups * p.group_size + 63) / 64 * 64);
    return launch(grouped_kernel<Weights, TOKEN_TILES, kWarps>, dim3(owners, (p.m + kTokens - 1) / kTokens), kWarps * 32,
                  bytes(g.strips_max, g.phase_groups), p.stream, p, g);
}

}  // namespace
}  // namespace skinny

cudaError_t skinny_grouped(SkinnyProblem const& p) {
    bool const int4 = p.format == WeightFormat::kInt4Tiles;
    if (p.m > 8) {
        cudaError_t const error =
            int4 ? skinny::run_grouped<skinny::Int4Tiles, 4>(p) : skinny::run_grouped<skinny::Int8Rows, 4>(p);
        if (succeeded(error) || error != cudaErrorInvalidValue) return error;  // else one group of 32 tokens does not fit in shared memory
    }
    return int4 ? skinny::run_grouped<skinny::Int4Tiles, 1>(p) : skinny::run_grouped<skinny::Int8Rows, 1>(p);
}

}  // namespace quarot
