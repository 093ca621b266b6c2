// int4 -> int8 for the packed weights of this library: three instructions for eight weights, each byte ends up as 16*w.
#pragma once

#include "cute/tensor.hpp"
// Brings mixed_input_utils.hpp, which cannot be included alone.
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/numeric_types.h"

namespace quarot::sm90 {

/// One 16 x 32 atom of the packed weights as a CuTe layout (row, k) -> nibble index; see csrc/gemm/NOTES.md.
///
/// Lane 4*(row mod 8) + (k mod 16)/4 owns 16 nibbles in a row: byte 4*(k/16) + k mod 4 of its eight, low nibble for
/// rows 0-7.
using WeightAtom =
    cute::Layout<cute::Shape<cute::Shape<cute::_8, cute::_2>, cute::Shape<cute::_4, cute::_4, cute::_2>>,
                 cute::Stride<cute::Stride<cute::_64, cute::_1>, cute::Stride<cute::_2, cute::_16, cute::_8>>>;

}  // namespace quarot::sm90

namespace cutlass {

/// Eight nibbles of one lane, in fragment order: byte c holds rows r (low) and r+8 (high) of column c.
///
/// Leaving the value in the upper half of its byte makes it 16*w as a signed byte, so no sign extension is needed; the
/// epilogue multiplies the accumulator by 1/16, which is exact.
template <>
struct LayoutAwareConvertImpl<int4b_t, int8_t,
                              cute::Layout<cute::Shape<cute::_4, cute::_2>, cute::Stride<cute::_2, cute::_1>>,
                              cute::Layout<cute::_8>> {
    template <class EngineIn, class EngineOut>
    CUTLASS_DEVICE static void convert(
        cute::Tensor<EngineIn, cute::Layout<cute::Shape<cute::_4, cute::_2>, cute::Stride<cute::_2, cute::_1>>> const&
            src,
        cute::Tensor<EngineOut, cute::Layout<cute::_8>>& dst) {
        using Pair = cutlass::AlignedArray<uint32_t, 2, sizeof(uint32_t) * 2>;
        uint32_t const packed = cute::recast<uint32_t>(src)(0);
        auto&& out = cute::recast<Pair>(dst)(0);
        out[0] = (packed << 4) & 0xF0F0F0F0u;
        out[1] = packed & 0xF0F0F0F0u;
    }
};

}  // namespace cutlass
