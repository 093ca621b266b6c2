// Hopper GEMM: int8 weights x int8 activations, both through shared memory (wgmma SS) -> int32 -> scales -> 16-bit
// output.
//
// CUTLASS computes out^T[N, M] = W[N, K] X[M, K]^T, so weights are the "A" operand and tokens the "N" extent: the number of
// tokens needs neither padding nor alignment. One source file instantiates one tile (each takes minutes to compile).
#pragma once

#define CUTLASS_ENABLE_GDC_FOR_SM90 1  // griddepcontrol.wait inside the kernel, so that it may be launched early (PDL)

#include "gemm/dequant_epilogue.h"
#include "gemm/sm90/launch.h"
#include "gemm/sm90/mainloop.h"

#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/gemm/kernel/tile_scheduler.hpp"

namespace quarot::sm90 {

/// RESERVED: bytes of shared memory left to a second block of the SM (fewer pipeline stages).
template <class TileShape, class KernelSchedule, class EpilogueSchedule, class Scheduler = void, int RESERVED = 0>
struct W8A8 {
    using Element16 = cutlass::half_t;  // a 16-bit container: see Dequant16
    using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
    using TokenScale = cutlass::epilogue::fusion::Sm90RowBroadcast<0, TileShape, float, float,
                                                                   cute::Stride<cute::_0, cute::_1, cute::_0>, 1>;
    using ChannelScale = cutlass::epilogue::fusion::Sm90ColBroadcast<0, TileShape, float, float,
                                                                     cute::Stride<cute::_1, cute::_0, cute::_0>, 1>;
    using Fusion = cutlass::epilogue::fusion::Sm90EVT<
        cutlass::epilogue::fusion::Sm90Compute<Dequant16, Element16, float, cutlass::FloatRoundStyle::round_to_nearest>,
        cutlass::epilogue::fusion::Sm90AccFetch, TokenScale, ChannelScale, ChannelScale>;

    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
        cutlass::epilogue::collective::EpilogueTileAuto, int32_t, float, void, cutlass::layout::ColumnMajor, 8,
        Element16, cutlass::layout::ColumnMajor, 8, EpilogueSchedule, Fusion>::CollectiveOp;
    using Mainloop = ReadableTokens<typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, int8_t, cutlass::layout::RowMajor, 16, int8_t,
        cutlass::layout::ColumnMajor, 16, int32_t, TileShape, ClusterShape,
        cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage)) +
                                                          RESERVED>,
        KernelSchedule>::CollectiveOp>;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue, Scheduler>;
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

    static typename Gemm::Arguments arguments(GemmProblem const& p) {
        typename Gemm::Arguments args{};
        args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
        args.problem_shape = cute::make_shape(p.n, p.m, p.k, 1);
        args.mainloop.ptr_A = static_cast<int8_t const*>(p.weight);
        args.mainloop.dA = cute::make_stride(int64_t(p.k), cute::_1{}, int64_t(0));
        args.mainloop.ptr_B = static_cast<int8_t const*>(p.codes);
        args.mainloop.tokens = readable_tokens(p, cute::size<1>(TileShape{}));
        args.mainloop.dB = cute::make_stride(int64_t(p.k), cute::_1{}, int64_t(0));
        set_epilogue(args.epilogue, p, 1.0f);
        set_scheduler<TileShape>(args, p);
        return args;
    }

    /// Where the weights of `parts` parts of K are, `k` columns each.
    template <class Stride>
    static Stride cut(Stride whole, int k, int) {
        cute::get<2>(whole) = k;
        return whole;
    }
};

}  // namespace quarot::sm90
