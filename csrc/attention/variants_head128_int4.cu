// head_dim 128, 4 bits: the paper's format first, then the narrower groups.
#include "attention/make_variant.cuh"

namespace quarot {

DecodeVariants head128_int4_variants() {
    static const DecodeVariant variants[] = {
        make_variant<128, 4, 4>(),
        make_variant<128, 4, 4, 64, 64>(),
        make_variant<128, 4, 4, 32, 32>(),
    };
    return {variants, sizeof(variants) / sizeof(variants[0])};
}

}  // namespace quarot
