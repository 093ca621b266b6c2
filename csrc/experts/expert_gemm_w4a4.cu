// The few-token kernel (gemm/skinny_kernel.cuh) with an expert for every row. See NOTES.md.
//
// Rows of one expert, up to 8 (16) of them, make a job: they share one read of the expert's weights. Every block finds
// the jobs by itself (a few hundred clocks, and no kernel in between), takes an equal share of all jobs' strips of 16
// channels, and cuts it into items of one strip and UNITS * 64 of K, of which each warp streams a consecutive run.
// spills: two words on sm_86 and sm_89, where 16 warps twice an SM leave 64 registers; fewer warps are slower.
#include "experts/expert_gemm_w4a4.h"

#include "gemm/skinny_launch.cuh"

namespace quarot {
namespace {

using namespace skinny;

struct ExpertGeometry {
    int strips_max;  // most strips any block can own
    int jobs_max;    // most jobs that so many rows can make
};

/// In shared memory, behind the sums. Rows that share an expert, TOKENS at most, are a job.
template <int TOKENS>
struct Jobs {
    int row_expert[kMostExpertRows];  // -1 where there is none such
    float row_scale[kMostExpertRows];
    unsigned leaders[kMostExpertRows / 32];  // a bit a row: it is the first of a job
    int expert[kMostExpertRows];             // of each job
    int size[kMostExpertRows];
    short rows[kMostExpertRows][TOKENS];
};

template <int TILES, int UNITS, int WARPS, int BLOCKS>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS)
    expert_gemm_kernel(ExpertProblem const p, ExpertGeometry const g) {
    constexpr int kTokens = TILES * 8, kThreads = WARPS * 32, kRowWarps = kMostExpertRows / 32;
    static_assert(kThreads >= kMostExpertRows, "a thread a row");
    extern __shared__ __align__(128) int sums[];  // [strips_max][kTokens][kAccStride]
    float* const channel_scale = reinterpret_cast<float*>(sums + g.strips_max * kTokens * kAccStride);  // [strips_max][16]
    Jobs<kTokens>& table = *reinterpret_cast<Jobs<kTokens>*>(channel_scale + g.strips_max * 16);
    int const thread = threadIdx.x, lane = thread % 32, warp = thread / 32;

    for (int i = thread; i < g.strips_max * kTokens * kAccStride; i += kThreads) sums[i] = 0;

    auto read_expert = [&] {
        if (thread >= p.rows) return -1;
        std::int64_t const e = __ldcg(reinterpret_cast<long long const*>(p.expert) + thread);
        return e >= 0 && e < p.experts ? int(e) : -1;
    };
    // Rows of one expert in their order: the first of every kTokens leads a job, whose number is how many lead before.
    auto find_jobs = [&](int expert) {
        for (int i = thread; i < g.jobs_max; i += kThreads) table.size[i] = 0;
        if (thread < p.rows) table.row_expert[thread] = expert;
        __syncthreads();
        int place = 0, leader = thread;
        if (expert >= 0)
            for (int r = 0; r < thread; ++r)
                if (table.row_expert[r] == expert && place++ % kTokens == 0) leader = r;
        place %= kTokens;
        if (place == 0) leader = thread;
        if (warp < kRowWarps) {
            unsigned const votes = __ballot_sync(~0u, expert >= 0 && place == 0);
            if (lane == 0) table.leaders[warp] = votes;
        }
        __syncthreads();
        int jobs = 0, job = 0;
        for (int i = 0; i < kRowWarps; ++i) {
            if (i == leader / 32) job = jobs + __popc(table.leaders[i] & ((1u << leader % 32) - 1));
            jobs += __popc(table.leaders[i]);
        }
        if (expert >= 0) {
            if (place == 0) table.expert[job] = expert;
            table.rows[job][place] = short(thread);
            atomicAdd(table.size + job, 1);
        }
        __syncthreads();
        return jobs;
    };

    int const strips = p.n / 16, units = (p.k + kUnit - 1) / kUnit, chunks = (units + UNITS - 1) / UNITS;
    int count = 0, first_job = 0, first_strip = 0;  // of the block
    int item = 0, item_end = 0;                     // of the warp: chunk by chunk, and the strips of a chunk in order
    int chunk = 0, strip = 0;  // of the item whose weights are loaded next; strips count from the block's first
    int next_job = 0, next_strip = 0;
    auto seek = [&](int to_chunk, int to_strip) {
        chunk = to_chunk;
        strip = to_strip;
        next_job = first_job + (first_strip + to_strip) / strips;
        next_strip = (first_strip + to_strip) % strips;
    };
    uint32_t w[UNITS][Int4Tiles::kRegisters], b[TILES][UNITS][4];
    char const* weights = nullptr;
    int atoms = 0;
    auto aim = [&](bool there) {
        size_t const at = size_t(table.expert[there ? next_job : 0]) * strips + next_strip;
        weights = Int4Tiles::lane_pointer(p.weight, 0, p.k, p.n, lane) + at * size_t(p.k / 32) * 256 +
                  size_t(chunk) * UNITS * Int4Tiles::kUnitBytes;
        atoms = there ? p.k / 32 - 2 * UNITS * chunk : 0;
    };
    auto begin = [&](int jobs) {  // finds the block's share and the warp's, and asks for its first weights
        int const total = jobs * strips, each = total / int(gridDim.x), more = total % int(gridDim.x);
        int const first = int(blockIdx.x) * each + min(int(blockIdx.x), more);
        count = each + (int(blockIdx.x) < more);
        first_job = first / strips;
        first_strip = first % strips;
        item = int(unsigned(warp) * (count * chunks) / WARPS);
        item_end = int(unsigned(warp + 1) * (count * chunks) / WARPS);
        if (item < item_end) {
            seek(item / count, item % count);
            aim(true);
#pragma unroll
            for (int u = 0; u < UNITS; ++u) Int4Tiles::load(w[u], weights, u, atoms, 0);
        }
        for (int i = thread; i < count * 4; i += kThreads) {  // so that the epilogue need not wait for them
            int const at = first_strip + i / 4, s = at % strips;
            float const* const scales = p.weight_scale + size_t(table.expert[first_job + at / strips]) * p.n + s * 16;
            copy_16_bytes(uint32_t(__cvta_generic_to_shared(channel_scale + i * 4)), scales + i % 4 * 4);
        }
    };
    // Activations straight from L2 to fragments: a job has few rows, and a run of items seldom changes the chunk.
    auto fetch_activations = [&] {
#pragma unroll
        for (int t = 0; t < TILES; ++t) {
            int const at = t * 8 + lane / 4;
            bool const there = at < table.size[next_job];
            int const row = there ? table.rows[next_job][at] / p.top_k : 0;
            char const* const codes = static_cast<char const*>(p.codes) + size_t(row) * p.k +
                                      size_t(chunk) * UNITS * kUnit + lane % 4 * 4;
#pragma unroll
            for (int u = 0; u < UNITS; ++u)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    b[t][u][i] = 0;
                    if (there && 2 * u + i / 2 < p.k / 32 - 2 * UNITS * chunk)
                        b[t][u][i] = *reinterpret_cast<uint32_t const*>(codes + u * kUnit + i * 16);
                }
        }
    };
    // The kernel in front quantises, so the experts were most likely chosen before it. If not, all begins again.
    int expert = -1;
    for (bool guess = true;; guess = false) {
        if (!guess) {
            wait_for_previous_kernel();
            let_next_kernel_start();
        }
        int const found = read_expert();
        if (!guess && !__syncthreads_or(found != expert)) break;
        asm volatile("cp.async.wait_all;" ::: "memory");  // scales of a wrong guess must not come after the right ones
        expert = found;
        begin(find_jobs(expert));
        if (!guess) break;
    }
    if (thread < p.rows) copy_4_bytes(table.row_scale + thread, p.row_scale + thread / p.top_k);
    if (item < item_end) fetch_activations();

    for (; item < item_end; ++item) {
        int const this_strip = strip, rows = table.size[next_job], this_chunk = chunk, this_job = next_job;
        bool const there = item + 1 < item_end;
        if (there) {
            ++strip;
            if (++next_strip == strips) next_strip = 0, ++next_job;
            if (strip == count) seek(chunk + 1, 0);
        }
        aim(there);
        int c[TILES][4] = {};
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            uint32_t a[2][4];
            Int4Tiles::fragment(a[0], w[u], 0);
            Int4Tiles::fragment(a[1], w[u], 1);
            Int4Tiles::load(w[u], weights, u, atoms, 0);
#pragma unroll
            for (int t = 0; t < TILES; ++t) {
                mma(c[t], a[0], b[t][u][0], b[t][u][1]);
                mma(c[t], a[1], b[t][u][2], b[t][u][3]);
            }
        }
        if (chunk != this_chunk || next_job != this_job) fetch_activations();
        int* const sum = sums + this_strip * kTokens * kAccStride + lane / 4;
#pragma unroll
        for (int t = 0; t < TILES; ++t)  // integers: the order of these adds cannot change the result
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int const token = t * 8 + lane % 4 * 2 + i % 2;
                if (token < rows) atomicAdd(sum + token * kAccStride + i / 2 * 8, c[t][i]);
            }
    }

    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    for (int done = 0; done < count;) {  // the strips of one job after those of another
        int const at = first_strip + done, this_job = first_job + at / strips, s = at % strips;
        int const width = min(strips - s, count - done) * 16;
        for (int i = thread; i < width * table.size[this_job]; i += kThreads) {
            int const token = i / width, column = i - token * width;
            int const row = table.rows[this_job][token], here = done * 16 + column;
            int const sum = sums[(here / 16 * kTokens + token) * kAccStride + here % 16];
            float const value = __fmul_rn(__fmul_rn(__fmul_rn(float(sum), Int4Tiles::kMultiplier), table.row_scale[row]),
                                          channel_scale[here]);
            store(p.out, size_t(row) * p.n + s * 16 + column, value, p.type);
        }
        done += width / 16;
    }
    for (int row = blockIdx.x; row < p.rows; row += gridDim.x)
        if (table.row_expert[row] < 0)
            for (int i = thread; i < p.n; i += kThreads)
                store(p.out, size_t(row) * p.n + i, __int_as_float(0x7fffffff), p.type);
}

template <int TILES, int UNITS, int WARPS, int BLOCKS>
cudaError_t run(ExpertProblem const& p) {
    constexpr int kTokens = TILES * 8;
    Device const& device = current_device();
    ExpertGeometry g;
    int const used = std::min(p.experts, p.rows);
    g.jobs_max = std::min(p.rows, (p.rows + used * (kTokens - 1)) / kTokens);
    int const strips = g.jobs_max * (p.n / 16), strip_bytes = kTokens * kAccStride * 4 + 64;
    int const table_bytes = sizeof(Jobs<kTokens>);
    int const budget = std::min(device.shared_per_block, device.shared_per_multiprocessor / BLOCKS - 1024) - table_bytes;
    int blocks = std::min(strips, device.multiprocessors * BLOCKS);
    // Where the sums of a block's strips do not fit in shared memory, more blocks run as further waves.
    while (blocks < strips && (strips + blocks - 1) / blocks * strip_bytes > budget) blocks = std::min(strips, 2 * blocks);
    g.strips_max = (strips + blocks - 1) / blocks;
    return launch(expert_gemm_kernel<TILES, UNITS, WARPS, BLOCKS>, dim3(blocks), WARPS * 32,
                  g.strips_max * strip_bytes + table_bytes, p.stream, p, g);
}

}  // namespace

cudaError_t expert_gemm_w4a4(ExpertProblem const& p) {
    if (p.rows == 0 || p.n == 0) return cudaSuccess;
    if (p.rows < 0 || p.rows > kMostExpertRows || p.top_k < 1 || p.rows % p.top_k != 0 || p.experts < 1 || p.n % 16 != 0 ||
        p.k % 32 != 0)
        return cudaErrorInvalidValue;
    // Measured (NOTES.md). Jobs of 16 rows only where experts are expected to have several: twice the registers and sums.
    if (p.rows > 2 * p.experts) return run<2, 2, 32, 1>(p);
    bool const large = std::int64_t(std::min(p.rows, p.experts)) * p.n * p.k / 2 >= (16 << 20);  // bytes of weights
    return large ? run<1, 4, 16, 2>(p) : run<1, 4, 12, 2>(p);
}

}  // namespace quarot
