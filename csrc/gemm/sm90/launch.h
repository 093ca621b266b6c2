// What the Hopper CUTLASS sources share: argument plumbing and the launch.
#pragma once

#include "gemm/sm90/problem.h"

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"

#include <algorithm>

namespace quarot::sm90 {

/// Fills the visitor arguments in tree order: accumulator, token scale, channel scale, bias, then the node itself.
template <class EpilogueArguments>
void set_epilogue(EpilogueArguments& epilogue, GemmProblem const& p, float acc_multiplier) {
    using StrideD = decltype(epilogue.dD);
    epilogue.thread = {
        {}, {p.row_scale}, {p.weight_scale}, {p.bias, -0.0f}, {acc_multiplier, p.bf16}};  // x + -0.0f == x, bit for bit
    epilogue.ptr_C = nullptr;
    epilogue.ptr_D = static_cast<decltype(epilogue.ptr_D)>(p.out);
    epilogue.dD = StrideD{};
    cute::get<1>(epilogue.dD) = p.ldd;
    epilogue.dC = epilogue.dD;
}

/// Rows of the activations that a grid of whole tiles reads, as far as the caller's memory goes.
inline int readable_tokens(GemmProblem const& p, int tile) {
    return std::max(p.m, std::min((p.m + tile - 1) / tile * tile, p.readable_rows));
}

/// Up to so many tokens the grid goes on along the tokens; beyond, CUTLASS decides by its shape.
inline constexpr int kFewTokens = 8192;

/// Channel tiles that follow each other in the grid before it goes on: SMs next to each other ask for the same tokens, the
/// larger operand, at the same time (NOTES.md, "The order of the tiles").
///
/// CUTLASS rounds the grid up to multiples of it in both directions and computes the tiles it adds, so it is used only
/// where those are few: 9 token tiles would cost as many as 16.
inline int swizzle(int channel_tiles, int token_tiles, int tokens) {
    auto const round_up = [](int a, int b) { return (a + b - 1) / b * b; };
    int size = tokens > kFewTokens ? 8 : 4;
    while (round_up(channel_tiles, size) * round_up(token_tiles, size) > channel_tiles * token_tiles * 33 / 32) size /= 2;
    return size;
}

template <class TileShape, class Arguments>
void set_scheduler(Arguments& args, GemmProblem const& p) {
    int const chosen = swizzle(cute::ceil_div(p.n, int(cute::size<0>(TileShape{}))),
                               cute::ceil_div(p.m, int(cute::size<1>(TileShape{}))), p.m);
    args.scheduler.max_swizzle_size = p.swizzle ? p.swizzle : chosen;
    if (p.m <= kFewTokens) args.scheduler.raster_order = decltype(args.scheduler.raster_order)::AlongN;
    args.hw_info.device_id = 0;
    args.hw_info.sm_count = p.sm_count;
}

/// Runs one instantiation. Every error comes back as a cudaError_t; nothing is allocated and nothing synchronises.
template <class Config>
cudaError_t launch(GemmProblem const& p) {
    typename Config::Gemm gemm;
    auto const args = Config::arguments(p);
    if (Config::Gemm::get_workspace_size(args) > p.workspace_bytes) return cudaErrorMemoryAllocation;
    if (gemm.initialize(args, p.workspace, p.stream) != cutlass::Status::kSuccess) {
        cudaError_t const error = cudaGetLastError();
        return error != cudaSuccess ? error : cudaErrorInvalidConfiguration;
    }
    if (gemm.run(p.stream, nullptr, /*launch_with_pdl=*/true) != cutlass::Status::kSuccess) {
        cudaError_t const error = cudaGetLastError();
        return error != cudaSuccess ? error : cudaErrorLaunchFailure;
    }
    return cudaSuccess;
}

}  // namespace quarot::sm90
