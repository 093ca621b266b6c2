// Ampere/Ada GEMM: packed int4 x packed int4 on the INT4 tensor cores (m16n8k64) -> int32 -> scales -> 16-bit output.
//
// CUTLASS 2.x with Stream-K: the tiles that do not fill the last wave are cut along K. Partial sums are integers, so
// the result does not depend on the cut. One source file instantiates one tile.
#pragma once

#include "gemm/dequant_epilogue.h"
#include "gemm/sm80/kernels.h"

// In this order: the visitors rely on what the device and kernel headers bring.
// clang-format off
#include "cutlass/gemm/device/gemm_universal.h"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cute/tensor.hpp"
#include "cutlass/gemm/kernel/default_gemm_universal_with_visitor.h"
#include "cutlass/epilogue/threadblock/fusion/visitors.hpp"
// clang-format on

namespace quarot::sm80 {

/// Visitor node: (accumulator, token scale, channel scale, bias) -> 16-bit output, see Dequant16.
struct DequantNode : cutlass::epilogue::threadblock::VisitorImpl2x<> {
    using Arguments = DequantArguments;
    using Params = Arguments;
    struct SharedStorage {};

    template <class ProblemShape>
    static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
        return args;
    }
    template <class ProblemShape>
    static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
        return 0;
    }

    CUTLASS_HOST_DEVICE DequantNode() {}
    CUTLASS_HOST_DEVICE DequantNode(Params const& params, SharedStorage const&) : params(&params) {}

    struct Callbacks : cutlass::epilogue::threadblock::EmptyCallbacks {
        CUTLASS_DEVICE explicit Callbacks(Params const* params) : params(params) {}

        template <class Accumulator, int N>
        CUTLASS_DEVICE auto visit(int, int, int, int, cutlass::Array<Accumulator, N> const&,
                                  cutlass::Array<Accumulator, N> const& acc,
                                  cutlass::Array<float, N> const& token_scale,
                                  cutlass::Array<float, N> const& channel_scale, cutlass::Array<float, N> const& bias) {
            cutlass::Array<float, N> value;
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < N; ++i) value[i] = __int2float_rn(acc[i]);
            return Dequant16<cutlass::Array<float, N>>{}(value, token_scale, channel_scale, bias, *params);
        }
        Params const* params;
    };

    template <class ProblemShape>
    CUTLASS_DEVICE auto get_callbacks(cutlass::gemm::GemmCoord, int, ProblemShape) {
        return Callbacks(params);
    }
    Params const* params;
};

template <class Tile, class WarpTile, int STAGES>
struct W4A4 {
    using Element = cutlass::int4b_t;
    using Element16 = cutlass::half_t;  // a 16-bit container: see Dequant16
    static constexpr int kAlignmentOut = 8;

    using ThreadMap =
        cutlass::epilogue::threadblock::OutputTileThreadLayout<Tile, WarpTile, Element16, kAlignmentOut, 1>;
    using TokenScale = cutlass::epilogue::threadblock::VisitorColBroadcast<ThreadMap, float,
                                                                           cute::Stride<cute::_1, cute::_0, int32_t>>;
    using ChannelScale = cutlass::epilogue::threadblock::VisitorRowBroadcast<ThreadMap, float,
                                                                             cute::Stride<cute::_0, cute::_1, int32_t>>;
    using Output = cutlass::epilogue::threadblock::VisitorAuxStore<
        ThreadMap, Element16, cutlass::FloatRoundStyle::round_to_nearest, cute::Stride<int64_t, cute::_1, int64_t>>;
    using Tree = cutlass::epilogue::threadblock::Sm80EVT<
        Output, cutlass::epilogue::threadblock::Sm80EVT<DequantNode, cutlass::epilogue::threadblock::VisitorAccFetch,
                                                        TokenScale, ChannelScale, ChannelScale>>;
    using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
        Element, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, 32, Element, cutlass::layout::ColumnMajor,
        cutlass::ComplexTransform::kNone, 32, Element16, cutlass::layout::RowMajor, kAlignmentOut, int32_t, float,
        cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Tile, WarpTile, cutlass::gemm::GemmShape<16, 8, 64>, Tree,
        cutlass::gemm::threadblock::ThreadblockSwizzleStreamK, STAGES, cutlass::arch::OpMultiplyAddSaturate,
        1>::GemmKernel;
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

    static typename Gemm::Arguments arguments(GemmProblem const& p) {
        typename Tree::Arguments epilogue{{{},
                                           {p.row_scale, 0.0f, {}},
                                           {p.weight_scale, 0.0f, {}},
                                           {p.bias, -0.0f, {}},
                                           {1.0f, p.bf16}},  // x + -0.0f == x
                                          {static_cast<Element16*>(p.out), {p.ldd, cute::_1{}, 0}}};
        return typename Gemm::Arguments(cutlass::gemm::GemmUniversalMode::kGemm, {p.m, p.n, p.k}, 1, epilogue, p.codes,
                                        p.weight, nullptr, nullptr, 0, 0, 0, 0, p.k, p.k, 0, 0, -1);
    }
};

template <class Config>
cudaError_t launch(GemmProblem const& p) {
    typename Config::Gemm gemm;
    auto const args = Config::arguments(p);
    if (Config::Gemm::get_workspace_size(args) > p.workspace_bytes) return cudaErrorMemoryAllocation;
    cutlass::Status status = gemm.initialize(args, p.workspace, p.stream);
    if (status == cutlass::Status::kSuccess) status = gemm.run(p.stream);
    if (status == cutlass::Status::kSuccess) return cudaSuccess;
    cudaError_t const error = cudaGetLastError();
    return error != cudaSuccess ? error : cudaErrorInvalidConfiguration;
}

template <class Config>
std::size_t workspace_bytes(GemmProblem const& p) {
    return Config::Gemm::get_workspace_size(Config::arguments(p));
}

}  // namespace quarot::sm80
