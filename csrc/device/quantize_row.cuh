// The per-token quantiser: symmetric, absmax, 2-8 bits; the same fp32 operations in the same order as the reference
// (quarot/ops/quantize_per_token.py), so that codes and scales are equal bit for bit.
//
//   s = absmax * c,  c = fp32(clip / qmax),  qmax = 2^(bits-1) - 1
//   s < 2^-126       -> s = 0, codes 0          (all-zero rows; no denormal scale reaches the GEMM)
//   s not finite     -> s = NaN, codes 0        (NaN or inf stays in its row)
//   otherwise        -> code = clamp(rint(x * (1/s)), -qmax-1, qmax), round half to even
// In upper halves 16 * code and s / 16 are stored, and s < 2^-122 is 0.
#pragma once

#include <cuda_runtime.h>

#include "device/code_layout.h"

namespace quarot {

// How one row is turned into codes. lo = hi = 0 makes every code 0, whatever x is (a NaN is clamped to 0 too).
struct RowQuantizer {
    float scale, inverse, lo, hi;
};

__device__ __forceinline__ RowQuantizer row_quantizer(float absmax, float clip_over_qmax, int bits,
                                                      CodeLayout layout = CodeLayout::kBytes) {
    const float qmax = static_cast<float>((1 << (bits - 1)) - 1);
    const float stored = layout == CodeLayout::kUpperHalves ? 0.0625f : 1.0f;
    RowQuantizer q{__fmul_rn(absmax, clip_over_qmax), 0.0f, 0.0f, 0.0f};
    if (!(q.scale <= 3.402823466e38f)) {
        q.scale = __uint_as_float(0x7fc00000u);
    } else if (q.scale * stored < 1.17549435e-38f) {
        q.scale = 0.0f;
    } else {
        q.inverse = __frcp_rn(q.scale);
        q.lo = -qmax - 1.0f;
        q.hi = qmax;
        q.scale *= stored;
    }
    return q;
}

// The code in the low byte (two's complement); the other bytes are not meaningful. Clamping before rounding equals
// rounding before clamping, since both bounds are integers; adding 1.5 * 2^23 then rounds half to even.
__device__ __forceinline__ unsigned code_bits(float x, const RowQuantizer& q) {
    const float clamped = fminf(fmaxf(__fmul_rn(x, q.inverse), q.lo), q.hi);
    return __float_as_uint(__fadd_rn(clamped, 12582912.0f));
}

// Low bytes of a, b, c, d in memory order.
__device__ __forceinline__ unsigned pack_bytes(unsigned a, unsigned b, unsigned c, unsigned d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

__device__ __forceinline__ uint2 codes8(const float (&v)[8], const RowQuantizer& q) {
    unsigned e[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) e[i] = code_bits(v[i], q);
    return make_uint2(pack_bytes(e[0], e[1], e[2], e[3]), pack_bytes(e[4], e[5], e[6], e[7]));
}

// Eight int8 codes in -8..7 -> 32 bits, nibble i = code i (low nibble of a byte = even column).
__device__ __forceinline__ unsigned pack_nibbles(uint2 codes) {
    unsigned lo = codes.x & 0x0f0f0f0fu, hi = codes.y & 0x0f0f0f0fu;
    lo |= lo >> 4, hi |= hi >> 4;  // bytes 0 and 2 now hold a pair each
    return __byte_perm(lo, hi, 0x6420);
}

// Four codes, a byte each, to the upper halves of their bytes.
__device__ __forceinline__ unsigned upper_halves(unsigned codes) { return codes << 4 & 0xf0f0f0f0u; }

// Stores the codes of columns 8 * index .. 8 * index + 7 of one row.
__device__ __forceinline__ void store_codes8(void* row_codes, int index, CodeLayout layout, uint2 codes) {
    if (layout == CodeLayout::kUpperHalves) codes = make_uint2(upper_halves(codes.x), upper_halves(codes.y));
    if (layout == CodeLayout::kNibbles)
        static_cast<unsigned*>(row_codes)[index] = pack_nibbles(codes);
    else
        static_cast<uint2*>(row_codes)[index] = codes;
}

}  // namespace quarot
