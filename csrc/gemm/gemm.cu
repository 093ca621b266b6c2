// Routes a call to its kernel.
#include "gemm/gemm.h"

#include "gemm/skinny_formats.h"
#include "gemm/skinny_launch.cuh"
#include "gemm/sm80/kernels.h"
#include "gemm/sm90/groups.h"
#include "gemm/sm90/kernels.h"
#include "gemm/sm90/ring.h"
#include "gemm/sm90/split.h"

namespace quarot {
namespace {

sm90::GemmProblem hopper_problem(GemmCall const& call, int sm_count) {
    SkinnyProblem const& p = call.problem;
    return {p.codes,
            p.row_scale,
            p.weight,
            p.weight_scale,
            p.bias,
            p.out,
            p.m,
            call.readable_rows,
            p.n,
            p.k,
            p.ldd,
            p.type == OutputType::kBFloat16,
            call.workspace,
            call.workspace_bytes,
            sm_count,
            p.stream};
}

sm80::GemmProblem int4_problem(GemmCall const& call) {
    SkinnyProblem const& p = call.problem;
    return {p.codes,
            p.row_scale,
            p.weight,
            p.weight_scale,
            p.bias,
            p.out,
            p.m,
            p.n,
            p.k,
            p.ldd,
            p.type == OutputType::kBFloat16,
            call.workspace,
            call.workspace_bytes,
            p.stream};
}

}  // namespace

GemmChoice gemm_choice(GemmCall const& call) {
    Device const& device = current_device();
    SkinnyProblem const& p = call.problem;
    return choose_gemm({p.m, p.n, p.k, p.format == WeightFormat::kInt4Tiles, p.group_size, call.packed_activations,
                        p.type == OutputType::kFloat32, p.ldd % 8 == 0, device.capability, device.multiprocessors});
}

GemmScratch gemm_scratch(GemmCall const& call, GemmChoice const& choice) {
    if (choice.kernel == GemmKernel::kSplit) {
        sm90::GemmProblem const p = hopper_problem(call, current_device().multiprocessors);
        std::size_t const tiles = sm90::split_tiles(p, choice.a, choice.b);
        return {sm90::split_workspace(p, choice.a, choice.b, choice.c), choice.c > 1 ? 2 * tiles : 0};
    }
    if (choice.kernel != GemmKernel::kInt4Cores) return {};
    sm80::GemmProblem const p = int4_problem(call);
    if (choice.a <= 64) return {sm80::w4a4_64x128_workspace(p)};
    return {choice.b <= 128 ? sm80::w4a4_128x128_workspace(p) : sm80::w4a4_128x256_workspace(p)};
}

cudaError_t gemm(GemmCall const& call, GemmChoice const& choice) {
    SkinnyProblem const& p = call.problem;
    if (p.m == 0 || p.n == 0) return cudaSuccess;
    bool const sixteen_bit = p.type != OutputType::kFloat32, int4 = p.format == WeightFormat::kInt4Tiles;
    bool const vector_rows = p.ldd % 8 == 0;  // 16-byte rows of the output: TMA and vector stores need them
    if (call.packed_activations != (choice.kernel == GemmKernel::kInt4Cores)) return cudaErrorInvalidValue;
    bool const tile = choice.kernel == GemmKernel::kTile, wide_groups = choice.kernel == GemmKernel::kWideGroups;
    if ((p.groups > 0) != (choice.kernel == GemmKernel::kGrouped || wide_groups) && !tile) return cudaErrorInvalidValue;
    switch (choice.kernel) {
        case GemmKernel::kSkinny: {
            SkinnyConfig const config{choice.a, choice.b, choice.c};
            return int4 ? skinny_int4(p, config) : skinny_int8(p, config);
        }
        case GemmKernel::kGrouped:
            return skinny_grouped(p);
        case GemmKernel::kTile:
            return int4 ? tile_int4(p) : cudaErrorInvalidValue;
        case GemmKernel::kWide: {
            Device const& device = current_device();
            if (!sixteen_bit || !vector_rows || int4 || device.capability != 90) return cudaErrorInvalidValue;
            sm90::GemmProblem problem = hopper_problem(call, device.multiprocessors);
            problem.swizzle = choice.c;
            return choice.b <= 128 ? sm90::w8a8_128x128_pingpong(problem) : sm90::w8a8_128x256(problem);
        }
        case GemmKernel::kSplit: {
            Device const& device = current_device();
            if (!sixteen_bit || !vector_rows || int4 || device.capability != 90) return cudaErrorInvalidValue;
            if (choice.b != 64) return cudaErrorInvalidValue;
            sm90::SplitProblem problem{hopper_problem(call, device.multiprocessors), choice.c, call.counters};
            problem.whole.swizzle = 1;  // tiles beyond the output would meet nobody
            return choice.a <= 64 ? sm90::w8a8_64x64_split(problem) : sm90::w8a8_128x64_split(problem);
        }
        case GemmKernel::kRing: {
            Device const& device = current_device();
            if (!sixteen_bit || !vector_rows || !int4 || device.capability != 90) return cudaErrorInvalidValue;
            return sm90::w4a8_ring(hopper_problem(call, device.multiprocessors), choice.a, choice.b, choice.c);
        }
        case GemmKernel::kWideGroups: {
            Device const& device = current_device();
            if (!sixteen_bit || !vector_rows || !int4 || device.capability != 90) return cudaErrorInvalidValue;
            return sm90::w4a8_groups(hopper_problem(call, device.multiprocessors), p.group_size, choice.a, choice.b);
        }
        case GemmKernel::kInt4Cores: {
            if (!sixteen_bit || !vector_rows || p.n % 8 != 0) return cudaErrorInvalidValue;
            sm80::GemmProblem const problem = int4_problem(call);
            if (choice.a <= 64) return sm80::w4a4_64x128(problem);
            return choice.b <= 128 ? sm80::w4a4_128x128(problem) : sm80::w4a4_128x256(problem);
        }
    }
    return cudaErrorInvalidValue;
}

}  // namespace quarot
