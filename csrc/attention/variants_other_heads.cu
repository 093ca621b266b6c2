// head_dim 80, 96 (Phi-3 mini), 192 and 256 (Gemma), 4 and 8 bits.
#include "attention/make_variant.cuh"

namespace quarot {

DecodeVariants other_head_variants() {
    static const DecodeVariant variants[] = {
        make_variant<80, 4, 4>(),  make_variant<96, 4, 4>(),  make_variant<192, 4, 4>(), make_variant<256, 4, 4>(),
        make_variant<96, 8, 8>(),  make_variant<256, 8, 8>(), make_variant<256, 4, 4, 128, 128>(),
    };
    return {variants, sizeof(variants) / sizeof(variants[0])};
}

}  // namespace quarot
