// The arithmetic behind every CUTLASS epilogue here: exact, and 16-bit outputs chosen at run time.
#pragma once

#include "cutlass/array.h"
#include "cutlass/numeric_types.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace quarot {

/// What the epilogue needs beyond its four inputs.
struct DequantArguments {
    float acc_multiplier = 1.0f;  ///< a power of two, so that the product is exact
    bool bf16 = false;            ///< store bfloat16 bits instead of float16 bits
};

/// ((float)acc * token_scale) * channel_scale + bias, each step rounded to float32 on its own.
///
/// The roundings are explicit (`__fmul_rn`, `__fadd_rn`): the compiler may not contract them into an FMA, so the result
/// is bit-equal to the reference and to the small-M kernel. One instantiation serves fp16 and bf16: the element type of
/// the output tensor is only a 16-bit container, which halves the number of slow CUTLASS compilations.
template <class T>
struct Dequant16 {
    using Arguments = DequantArguments;
};

template <int N>
struct Dequant16<cutlass::Array<float, N>> {
    using Arguments = DequantArguments;
    using Input = cutlass::Array<float, N>;

    CUTLASS_DEVICE cutlass::Array<cutlass::half_t, N> operator()(Input const& acc, Input const& token_scale,
                                                                 Input const& channel_scale, Input const& bias,
                                                                 Arguments const& args) const {
        cutlass::Array<cutlass::half_t, N> out;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < N; ++i) {
            float value =
                __fmul_rn(__fmul_rn(__fmul_rn(acc[i], args.acc_multiplier), token_scale[i]), channel_scale[i]);
            value = __fadd_rn(value, bias[i]);
            // Both conversions are computed and one is selected: two instructions, against a branch per fragment.
            unsigned short const half_bits = __half_as_ushort(__float2half_rn(value));
            unsigned short const bf16_bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
            out[i] = cutlass::half_t::bitcast(args.bf16 ? bf16_bits : half_bits);
        }
        return out;
    }
};

}  // namespace quarot
