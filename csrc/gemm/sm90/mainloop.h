// What is different from CUTLASS's mixed-input main loop: how it reads the tokens and when it converts the weights.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"

namespace quarot::sm90 {

/// A CUTLASS main loop that may read more tokens than the output has.
///
/// The copy engine fills rows beyond the end of a tensor with zeros, more slowly than it copies them. Where the caller's
/// memory goes on, the tensor is said to be longer; what is read there reaches no output.
template <class Base>
class ReadableTokens : public Base {
public:
    using typename Base::Params;

    struct Arguments : Base::Arguments {
        int tokens = 0;  ///< rows of the activations that may be read
    };

    template <class ProblemShape>
    static Params to_underlying_arguments(ProblemShape const& shape, Arguments const& args, void* workspace) {
        return Base::to_underlying_arguments(cute::replace<1>(shape, args.tokens), args, workspace);
    }
};

/// CUTLASS's main loop for packed int4 weights and int8 tokens, K tile by K tile.
///
/// The operands of a whole K tile are loaded and converted at once and its products issued together. CUTLASS does so for
/// 32 columns at a time, and such a step has the latency of its loads, its conversion and its barrier: 83 clocks for a
/// product of 64 x 64, which takes 32. Wider tiles hide that, and would lose by this loop (NOTES.md).
template <class Base>
class WholeTiles : public Base {
public:
    using typename Base::MainloopPipeline;
    using typename Base::Params;
    using typename Base::PipelineState;
    using typename Base::TensorStorage;

    /// Leaves the last K tile in flight, as `mma_tail` expects.
    template <class Accumulators>
    CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Accumulators& sums, int k_tiles, int thread,
                            TensorStorage& storage, Params const&) {
        auto const mine = packed_weights(storage, thread);
        typename Base::TiledMma products;
        auto const tokens = cute::make_tensor(cute::make_smem_ptr(storage.smem_B.begin()), typename Base::SmemLayoutB{});
        auto const group = cute::make_layout(cute::Int<kGroups>{}, cute::Int<128>{})(group_of(thread));
        auto const slice = products.get_slice(group);
        auto const operand = slice.make_fragment_B(slice.partition_B(tokens));

        PipelineState done = read;
        int tile = 0;
        Weights even, odd;
        products.accumulate_ = cute::GMMA::ScaleOut::Zero;
        auto step = [&](Weights& weights) {
            int const stage = read.index();
            pipeline.consumer_wait(read);
            Packed const packed = fetch(mine + stage * kStage);
            cute::warpgroup_wait<1>();  // the products of the tile before the last: `weights` held its operands
            if (tile >= 2) {
                pipeline.consumer_release(done);
                ++done;
            }
            convert(packed, weights);
            cute::warpgroup_fence_operand(sums);
            cute::warpgroup_arrive();
            CUTLASS_PRAGMA_UNROLL
            for (int k = 0; k < kSteps; ++k) {
                cute::gemm(products, weights(cute::_, cute::_, k), operand(cute::_, cute::_, k, stage), sums);
                products.accumulate_ = cute::GMMA::ScaleOut::One;
            }
            cute::warpgroup_commit_batch();
            cute::warpgroup_fence_operand(sums);
            ++read;
            ++tile;
        };
        CUTLASS_PRAGMA_NO_UNROLL
        for (; k_tiles >= 2; k_tiles -= 2) {
            step(even);
            step(odd);
        }
        if (k_tiles > 0) step(even);
        if (tile >= 2) {
            cute::warpgroup_wait<1>();
            pipeline.consumer_release(done);
        }
    }

private:
    using LayoutA = typename Base::SmemLayoutA;  // (row, k, stage) -> nibble
    static constexpr int kRows = cute::size<0>(typename Base::TileShape{});
    static constexpr int kSteps = cute::size<2>(typename Base::TileShape{}) / 32;
    static constexpr int kGroups = cute::size(typename Base::TiledMma{}) / 128;
    static constexpr int kBlocks = kRows / 64 / kGroups;  // of 64 rows, of a warpgroup
    static constexpr int kStrip = LayoutA{}(16, 0, 0) / 2, kStage = LayoutA{}(0, 0, 1) / 2;  // bytes
    static_assert(LayoutA{}(0, 32, 0) == 512 && LayoutA{}(kRows - 16, 0, 0) == (kRows / 16 - 1) * 2 * kStrip &&
                      LayoutA{}(0, 32 * (kSteps - 1), 0) == (kSteps - 1) * 512,
                  "the packed weights of a stage are not strips of atoms");

    struct Packed {
        uint2 step[kBlocks][kSteps];
    };
    using Weights = decltype(cute::make_tensor<int8_t>(cute::Shape<cute::_16, cute::Int<kBlocks>, cute::Int<kSteps>>{}));

    CUTLASS_DEVICE static int group_of(int thread) { return __shfl_sync(0xFFFFFFFF, thread / 128, 0); }

    /// Where this thread's bytes of the first atom of its rows are, in the first stage.
    CUTLASS_DEVICE static char const* packed_weights(TensorStorage& storage, int thread) {
        int const warp = thread % 128 / 32, lane = thread % 32;
        return reinterpret_cast<char const*>(&storage.smem_A) + (4 * group_of(thread) + warp) * kStrip + 8 * lane;
    }

    CUTLASS_DEVICE static Packed fetch(char const* from) {
        Packed packed;
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < kBlocks; ++m) {
            CUTLASS_PRAGMA_UNROLL
            for (int k = 0; k < kSteps; ++k)
                packed.step[m][k] = *reinterpret_cast<uint2 const*>(from + 4 * kGroups * m * kStrip + 256 * k);
        }
        return packed;
    }

    /// Nibbles to bytes of 16 * w: low ones are rows 0-7 of the atom, high ones rows 8-15.
    CUTLASS_DEVICE static void convert(Packed const& packed, Weights& weights) {
        auto registers = cute::recast<uint32_t>(weights);
        CUTLASS_PRAGMA_UNROLL
        for (int m = 0; m < kBlocks; ++m) {
            CUTLASS_PRAGMA_UNROLL
            for (int k = 0; k < kSteps; ++k) {
                uint2 const v = packed.step[m][k];
                registers(0, m, k) = (v.x << 4) & 0xF0F0F0F0u;
                registers(1, m, k) = v.x & 0xF0F0F0F0u;
                registers(2, m, k) = (v.y << 4) & 0xF0F0F0F0u;
                registers(3, m, k) = v.y & 0xF0F0F0F0u;
            }
        }
    }
};

}  // namespace quarot::sm90
