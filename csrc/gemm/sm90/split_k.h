// K of one output tile cut among several blocks, for layers with fewer tiles than the GPU has places.
//
// The part of K is CUTLASS's batch coordinate: weights and activations of part i begin K/parts columns further on, which
// the strides say, and the scheduler hands out (tile, part) pairs as it does for any batch. Before the epilogue the
// blocks of a tile add their int32 sums: whoever comes last reads what the others left and stores the output. Integers:
// the order of arrival cannot change the result.
#pragma once

#include "gemm/sm90/split.h"

#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

#include <cstdint>

namespace quarot::sm90 {

/// Device memory of one call. `counters` holds two per tile, zero before the launch and zero again after it.
struct SplitWorkspace {
    int4* sums = nullptr;  ///< [tiles][parts][accumulators of a thread / 4][threads]
    unsigned* counters = nullptr;
};

/// A CUTLASS epilogue collective behind the meeting of the blocks.
template <class Base>
class SplitKEpilogue : public Base {
public:
    struct Arguments : Base::Arguments {
        SplitWorkspace split{};
    };
    struct Params : Base::Params {
        SplitWorkspace split;
    };

    template <class ProblemShape>
    static Params to_underlying_arguments(ProblemShape const& shape, Arguments const& args, void* workspace) {
        return {Base::to_underlying_arguments(whole(shape), args, workspace), args.split};
    }

    template <class ProblemShape>
    static bool can_implement(ProblemShape const& shape, Arguments const& args) {
        return Base::can_implement(whole(shape), args);
    }

    CUTLASS_HOST_DEVICE SplitKEpilogue(Params const& params, typename Base::TensorStorage& storage)
        : Base(params, storage), split_(params.split) {}

    template <class ProblemShape, class TileShape, class TileCoord, class Engine, class Layout, class TiledMma>
    CUTLASS_DEVICE auto store(typename Base::LoadPipeline load, typename Base::LoadPipelineState load_state,
                              typename Base::StorePipeline store, typename Base::StorePipelineState store_state,
                              ProblemShape shape, TileShape tile, TileCoord coord,
                              cute::Tensor<Engine, Layout> accumulators, TiledMma mma, int thread,
                              typename Base::TensorStorage& storage, int subtile = -1) {
        auto const nothing_stored = cute::make_tuple(load_state, store_state);
        int const parts = cute::get<3>(shape);
        if (parts > 1) {
            int const channel_tile = cute::get<0>(coord), token_tile = cute::get<1>(coord);
            int const token_tiles = cute::ceil_div(int(cute::get<1>(shape)), int(cute::size<1>(tile)));
            // A swizzling scheduler rounds the grid of tiles up; tiles out there have neither output nor counters.
            if (channel_tile * int(cute::size<0>(tile)) >= int(cute::get<0>(shape)) || token_tile >= token_tiles)
                return nothing_stored;
            int const index = channel_tile * token_tiles + token_tile;
            if (!add_parts<cute::size(TiledMma{})>(accumulators, index, int(cute::get<3>(coord)), parts, thread))
                return nothing_stored;
        }
        auto const tile_coord = cute::make_coord(cute::get<0>(coord), cute::get<1>(coord), cute::get<2>(coord), 0);
        return Base::store(load, load_state, store, store_state, whole(shape), tile, tile_coord, accumulators, mma,
                           thread, storage, subtile);
    }

private:
    static constexpr auto kBarrier = cutlass::arch::ReservedNamedBarriers::StreamkBarrier0;  // no Stream-K here

    template <class ProblemShape>
    CUTLASS_HOST_DEVICE static auto whole(ProblemShape const& shape) {
        return cute::make_shape(cute::get<0>(shape), cute::get<1>(shape), cute::get<2>(shape), 1);
    }

    /// Whether any of the THREADS threads says so; also a barrier among them.
    template <int THREADS>
    CUTLASS_DEVICE static bool any(bool mine) {
        unsigned found;
        asm volatile(
            "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbarrier.cta.red.or.pred q, %2, %3, p;\nselp.u32 %0, 1, 0, q;\n}"
            : "=r"(found)
            : "r"(unsigned(mine)), "n"(static_cast<int>(kBarrier)), "n"(THREADS)
            : "memory");
        return found != 0;
    }

    /// True in the block that is to store the tile, whose accumulators are then complete.
    ///
    /// That is the last block to take a ticket, so it waits only for blocks that are past their K loop already.
    template <int THREADS, class Engine, class Layout>
    CUTLASS_DEVICE bool add_parts(cute::Tensor<Engine, Layout>& accumulators, int tile, int part, int parts,
                                  int thread) const {
        constexpr int kVectors = int(decltype(cute::size(accumulators))::value) / 4;
        unsigned* const tickets = split_.counters + 2 * tile;
        unsigned* const written = tickets + 1;
        int4* const sums = split_.sums + size_t(tile) * parts * kVectors * THREADS + thread;
        bool const last = any<THREADS>(thread == 0 && atomicAdd(tickets, 1u) == unsigned(parts - 1));
        if (!last) {
            int4* const mine = sums + part * kVectors * THREADS;
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kVectors; ++i)
                __stcg(mine + i * THREADS, make_int4(accumulators(4 * i), accumulators(4 * i + 1),
                                                     accumulators(4 * i + 2), accumulators(4 * i + 3)));
            __threadfence();
            cutlass::arch::NamedBarrier::sync(THREADS, kBarrier);
            if (thread == 0) asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(written) : "memory");
            return false;
        }
        if (thread == 0) {
            unsigned arrived;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(written) : "memory");
            } while (arrived != unsigned(parts - 1));
            *tickets = 0;
            *written = 0;
        }
        cutlass::arch::NamedBarrier::sync(THREADS, kBarrier);
        for (int other = 0; other < parts; ++other) {
            if (other == part) continue;
            int4 const* const theirs = sums + other * kVectors * THREADS;
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kVectors; ++i) {
                int4 const v = __ldcg(theirs + i * THREADS);
                accumulators(4 * i) += v.x;
                accumulators(4 * i + 1) += v.y;
                accumulators(4 * i + 2) += v.z;
                accumulators(4 * i + 3) += v.w;
            }
        }
        return true;
    }

    SplitWorkspace split_;
};

/// The kernel of `Whole` (a W8A8) with K cut; BLOCKS of it have to fit the registers of an SM.
template <class Whole, int BLOCKS>
struct SplitK {
    using Epilogue = SplitKEpilogue<typename Whole::Epilogue>;
    struct Kernel : cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, typename Whole::Mainloop,
                                                         Epilogue, typename Whole::Kernel::TileSchedulerTag> {
        static constexpr uint32_t MinBlocksPerMultiprocessor = BLOCKS;
    };
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

    static typename Gemm::Arguments arguments(SplitProblem const& p) {
        auto const whole = Whole::arguments(p.whole);
        int const k = p.whole.k / p.parts;
        typename Gemm::Arguments args{};
        args.mode = whole.mode;
        args.problem_shape = cute::make_shape(p.whole.n, p.whole.m, k, p.parts);
        args.mainloop = whole.mainloop;
        cute::get<2>(args.mainloop.dB) = k;
        args.mainloop.dA = Whole::cut(whole.mainloop.dA, k, p.parts);
        static_cast<typename Whole::Epilogue::Arguments&>(args.epilogue) = whole.epilogue;
        args.epilogue.split = {static_cast<int4*>(p.whole.workspace), p.counters};
        args.hw_info = whole.hw_info;
        args.scheduler = whole.scheduler;
        return args;
    }
};

/// Runs one instantiation; see launch() for the conventions.
template <class Config, int BLOCKS = 1>
cudaError_t launch_split(SplitProblem const& p) {
    if (p.parts < 1 || p.whole.k % (32 * p.parts) != 0) return cudaErrorInvalidValue;
    using Split = SplitK<Config, BLOCKS>;
    typename Split::Gemm gemm;
    cutlass::Status status = gemm.initialize(Split::arguments(p), nullptr, p.whole.stream);
    if (status == cutlass::Status::kSuccess) status = gemm.run(p.whole.stream, nullptr, /*launch_with_pdl=*/true);
    if (status == cutlass::Status::kSuccess) return cudaSuccess;
    cudaError_t const error = cudaGetLastError();
    return error != cudaSuccess ? error : cudaErrorInvalidConfiguration;
}

}  // namespace quarot::sm90
