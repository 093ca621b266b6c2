// The 17-128 token kernel; NOTES.md section "Split-K kernel" says why each part is as it is.
#include "gemm/sm90/w4a8_split_k.h"

#include "gemm/sm90/wgmma_s8.cuh"
#include "gemm/skinny_launch.cuh"

#include <algorithm>

namespace quarot::sm90 {
namespace {

constexpr int kChunkAtoms = 16;  // K of one pipeline step: 16 atoms of 32
constexpr int kGroupAtoms = 4;   // atoms per committed group of MMAs

struct SplitKGeometry {
    int atoms;   // K / 32
    int strips;  // ceil(N / 16)
    int splits;  // blocks of a cluster
};

/// Four int32 of block `rank` of the cluster, at the same shared-memory offset.
__device__ __forceinline__ int4 load_cluster_4(uint32_t shared_address, int rank) {
    int4 v;
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %4, %5;\n"
        "ld.shared::cluster.v4.s32 {%0,%1,%2,%3}, [remote];\n}"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "r"(shared_address), "r"(rank)
        : "memory");
    return v;
}

/// From one 16-byte column of activations (all tokens of it) to the next; the 32 spread a warp's copies over all banks.
template <int TOKENS>
constexpr int kColumnBytes = TOKENS * 16 + 32;

template <int TOKENS>
constexpr int kStageBytes = kChunkAtoms * 2 * kColumnBytes<TOKENS>;

/// wgmma descriptor of a K-major operand without swizzle: 8-token x 16-byte core matrices, the token blocks of one
/// column next to each other (SBO 128 bytes), the columns kColumnBytes apart (LBO).
template <int TOKENS>
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t shared_address) {
    return uint64_t((shared_address & 0x3FFFF) >> 4) | uint64_t(kColumnBytes<TOKENS> / 16) << 16 |
           uint64_t(128 / 16) << 32;
}

/// Cluster x / splits owns WARPGROUPS * 64 rows, block x % splits of it a share of K; blockIdx.y counts passes over
/// tokens.
template <int TOKENS, int WARPGROUPS, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(WARPGROUPS * 128, BLOCKS)
    split_k_kernel(SkinnyProblem const p, SplitKGeometry const g) {
    constexpr int kThreads = WARPGROUPS * 128, kWarps = kThreads / 32;
    constexpr int kRows = WARPGROUPS * 64;
    constexpr int kSumStride = kRows + 4;  // int32 words from token to token: fragment stores hit 32 banks
    extern __shared__ __align__(128) char shared[];
    uint32_t const shared_address = uint32_t(__cvta_generic_to_shared(shared));
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int const cluster = blockIdx.x / g.splits, rank = blockIdx.x - cluster * g.splits;
    int const atom_begin = rank * g.atoms / g.splits, atom_end = (rank + 1) * g.atoms / g.splits;
    int const chunks = (atom_end - atom_begin + kChunkAtoms - 1) / kChunkAtoms;
    int const token_begin = blockIdx.y * TOKENS;
    int const tokens = min(TOKENS, p.m - token_begin);
    int const strip = cluster * (kRows / 16) + warp;  // warp w of warpgroup i holds rows 64 i + 16 w: its own strip

    // Weights: straight to registers, always a chunk ahead.
    char const* weight = static_cast<char const*>(p.weight) + (size_t(strip) * g.atoms + atom_begin) * 256 + lane * 8;
    int left = strip < g.strips ? atom_end - atom_begin : 0;  // atoms not yet requested
    uint32_t raw[kChunkAtoms][2];
    auto request = [&](int i) {
        raw[i][0] = raw[i][1] = 0;
        if (i < left) skinny::Int4Tiles::load_8(raw[i][0], raw[i][1], weight + i * 256);
    };
#pragma unroll
    for (int i = 0; i < kChunkAtoms; ++i) request(i);
    weight += kChunkAtoms * 256;
    left -= kChunkAtoms;

    skinny::wait_for_previous_kernel();
    skinny::let_next_kernel_start();

    // Activations: a ring of chunks in wgmma's core-matrix order. A warp copies 8 tokens x 64 bytes at a time.
    char const* codes = static_cast<char const*>(p.codes) + size_t(token_begin) * p.k;
    auto stage_chunk = [&](int chunk) {
        uint32_t const target = shared_address + chunk % STAGES * kStageBytes<TOKENS>;
        int const column = (atom_begin + chunk * kChunkAtoms) * 32;
        int const column_end = atom_end * 32;
#pragma unroll
        for (int i = 0; i < TOKENS / kWarps + (TOKENS % kWarps != 0); ++i) {
            int const job = warp + i * kWarps;  // (token block, 64-byte column)
            int const token = job % (TOKENS / 8) * 8 + lane / 4;
            int const vector = job / (TOKENS / 8) * 4 + lane % 4;
            if (job < TOKENS && token < tokens && column + vector * 16 < column_end)
                skinny::copy_16_bytes(target + vector * kColumnBytes<TOKENS> + token * 16,
                                      codes + size_t(token) * p.k + column + vector * 16);
        }
    };
#pragma unroll
    for (int s = 0; s < STAGES - 2; ++s) {
        if (s < chunks) stage_chunk(s);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }

    int acc[TOKENS / 2];
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) acc[i] = 0;
    uint32_t fragment[2][kGroupAtoms][4];
    for (int chunk = 0; chunk < chunks; ++chunk) {
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 3) : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copies must be visible to wgmma
        __syncthreads();
        // Every warp has finished its MMAs on chunk - 2 (at most one group of the last chunk is in flight): refill that
        // stage.
        if (chunk + STAGES - 2 < chunks) stage_chunk(chunk + STAGES - 2);
        asm volatile("cp.async.commit_group;" ::: "memory");
        uint64_t descriptor = operand_descriptor<TOKENS>(shared_address + chunk % STAGES * kStageBytes<TOKENS>);
#pragma unroll
        for (int j = 0; j < kChunkAtoms / kGroupAtoms; ++j) {
            wgmma_wait<1>();  // the group that used this half of `fragment` is done
#pragma unroll
            for (int i = 0; i < kGroupAtoms; ++i) {
                uint32_t const x = raw[j * kGroupAtoms + i][0], y = raw[j * kGroupAtoms + i][1];
                fragment[j % 2][i][0] = (x << 4) & 0xF0F0F0F0u;
                fragment[j % 2][i][1] = x & 0xF0F0F0F0u;
                fragment[j % 2][i][2] = (y << 4) & 0xF0F0F0F0u;
                fragment[j % 2][i][3] = y & 0xF0F0F0F0u;
            }
#pragma unroll
            for (int i = 0; i < kGroupAtoms; ++i) request(j * kGroupAtoms + i);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kGroupAtoms; ++i) {
                Wgmma<TOKENS>::run(acc, fragment[j % 2][i], descriptor);
                descriptor +=
                    2 * kColumnBytes<TOKENS> / 16;  // 32 bytes of K are two columns; addresses count in 16 bytes
            }
            wgmma_commit();
        }
        weight += kChunkAtoms * 256;
        left -= kChunkAtoms;
    }
    wgmma_wait<0>();
    pin(acc);
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();

    // Sums of this block to shared memory (over the ring), then every block of the cluster finishes a share of the
    // tokens.
    int* const sums = reinterpret_cast<int*>(shared);
#pragma unroll
    for (int i = 0; i < TOKENS / 8; ++i) {
        int* const slot = sums + (8 * i + lane % 4 * 2) * kSumStride + warp * 16 + lane / 4;
        slot[0] = acc[4 * i];
        slot[kSumStride] = acc[4 * i + 1];
        slot[8] = acc[4 * i + 2];
        slot[kSumStride + 8] = acc[4 * i + 3];
    }
    if (g.splits > 1)
        skinny::cluster_barrier();
    else
        __syncthreads();
    constexpr int kQuads = kRows / 4;
    int const quad = threadIdx.x % kQuads;
    int const n = cluster * kRows + quad * 4;
    for (int token = rank + threadIdx.x / kQuads * g.splits; token < tokens; token += kThreads / kQuads * g.splits) {
        int4 sum = make_int4(0, 0, 0, 0);
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            if (r >= g.splits) break;
            int4 const part = load_cluster_4(shared_address + (token * kSumStride + quad * 4) * 4, r);
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        int const values[4] = {sum.x, sum.y, sum.z, sum.w};
        float const token_scale = p.row_scale[token_begin + token];
        size_t const row = size_t(token_begin + token) * p.ldd;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (n + i >= p.n) break;
            float value =
                __fmul_rn(__fmul_rn(__fmul_rn(float(values[i]), 0.0625f), token_scale), p.weight_scale[n + i]);
            if (p.bias != nullptr) value = __fadd_rn(value, p.bias[n + i]);
            skinny::store(p.out, row + n + i, value, p.type);
        }
    }
    if (g.splits > 1) skinny::cluster_barrier();  // nobody leaves while others read its sums
}

template <int TOKENS, int WARPGROUPS, int STAGES, int BLOCKS>
cudaError_t run(SkinnyProblem const& p, int splits) {
    SplitKGeometry g;
    g.atoms = p.k / 32;
    g.strips = (p.n + 15) / 16;
    g.splits = std::max(1, std::min({splits, 8, g.atoms}));
    int const clusters = (g.strips + WARPGROUPS * 4 - 1) / (WARPGROUPS * 4);
    int const chunks = ((g.atoms + g.splits - 1) / g.splits + kChunkAtoms - 1) / kChunkAtoms;
    int const ring = std::min(STAGES, chunks) * kStageBytes<TOKENS>;
    int const sums = TOKENS * (WARPGROUPS * 64 + 4) * 4;
    SkinnyProblem problem = p;
    void* arguments[] = {&problem, &g};
    return skinny::launch(split_k_kernel<TOKENS, WARPGROUPS, STAGES, BLOCKS>, arguments,
                          dim3(clusters * g.splits, (p.m + TOKENS - 1) / TOKENS), WARPGROUPS * 128,
                          std::max(ring, sums), g.splits,
                          /*hopper=*/true, p.stream);
}

}  // namespace

cudaError_t w4a8_split_k(SkinnyProblem const& p, SplitKConfig const& c) {
    if (c.tokens <= 32) {
        if (c.warpgroups <= 2) return run<32, 2, 6, 2>(p, c.cluster);
        return c.warpgroups == 3 ? run<32, 3, 8, 1>(p, c.cluster) : run<32, 4, 8, 1>(p, c.cluster);
    }
    if (c.tokens <= 64) {
        if (c.warpgroups <= 2) return run<64, 2, 3, 2>(p, c.cluster);
        return c.warpgroups == 3 ? run<64, 3, 6, 1>(p, c.cluster) : run<64, 4, 6, 1>(p, c.cluster);
    }
    return c.warpgroups <= 2 ? run<128, 2, 3, 1>(p, c.cluster) : run<128, 3, 3, 1>(p, c.cluster);
}

}  // namespace quarot::sm90
