// head_dim 128 at the other widths, one group a head, and the raw 16-bit pools.
// spills: two words of K4 V2, at the edge of the 168 registers that 12 warps an SM leave.
#include "attention/make_variant.cuh"

namespace quarot {

DecodeVariants head128_other_variants() {
    static const DecodeVariant variants[] = {
        make_variant<128, 2, 2>(),
        make_variant<128, 3, 3>(),
        make_variant<128, 8, 8>(),
        make_variant<128, 4, 2>(),
        make_variant<128, 4, 3>(),
        make_variant<128, 8, 4>(),
        make_variant<128, 16, 16>(),
        make_variant<128, 16, 16, 128, 128, true>(),
    };
    return {variants, sizeof(variants) / sizeof(variants[0])};
}

}  // namespace quarot
