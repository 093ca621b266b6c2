// Kernels that also store the new token: the formats most models decode with.
#include "attention/make_variant.cuh"

namespace quarot {

DecodeVariants append_variants() {
    static const DecodeVariant variants[] = {
        make_variant<128, 4, 4, 128, 128, false, true>(),
        make_variant<128, 8, 8, 128, 128, false, true>(),
        make_variant<64, 4, 4, 64, 64, false, true>(),
    };
    return {variants, sizeof(variants) / sizeof(variants[0])};
}

}  // namespace quarot
