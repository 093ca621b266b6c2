// head_dim 64 (small models).
#include "attention/make_variant.cuh"

namespace quarot {

DecodeVariants head64_variants() {
    static const DecodeVariant variants[] = {
        make_variant<64, 4, 4>(),
        make_variant<64, 4, 4, 32, 32>(),
        make_variant<64, 2, 2>(),
        make_variant<64, 3, 3>(),
        make_variant<64, 8, 8>(),
        make_variant<64, 16, 16>(),
        make_variant<64, 16, 16, 64, 64, true>(),
    };
    return {variants, sizeof(variants) / sizeof(variants[0])};
}

}  // namespace quarot
