// From packed codes in shared memory to operands of mma.sync.m16n8k16, without a conversion.
//
// `word & 0x000F000F` read as two fp16 is code x 2^-24 (a subnormal), `word & 0x00F000F0` is code x 2^-20 and so on: the
// tensor core takes subnormals exactly and at full speed, so unpacking 8 codes costs 4 ANDs and a shift, and the power of
// two (a "class" of mmas) is put right once per score or output. The layout (quarot/ops/kv_layout.py) is made for this.
#pragma once

#include <cstdint>

namespace quarot {

template <int N>
struct Int {
    static constexpr int value = N;
};

// Widths of the low plane of a bit width (3 bits = planes of 2 and 1), which also decides the chunks.
constexpr int plane_width(int bits) { return bits == 3 ? 2 : bits; }
// mmas of different power-of-two class: the class of mma i of a chunk is i % classes.
constexpr int code_classes(int bits) { return bits == 16 ? 1 : 8 / plane_width(bits); }

// Calls f(Int<C>, Int<base dim>) for every chunk of D dims at width W: 512/W dims, the rest in falling powers of two.
template <int D, int W, int Base = 0, typename F>
__device__ __forceinline__ void for_each_chunk(F&& f) {
    if constexpr (D > 0) {
        constexpr int kFull = 512 / W;
        constexpr int kDims = D >= kFull                     ? kFull
                              : D >= 256                     ? 256
                              : D >= 128                     ? 128
                              : D >= 64                      ? 64
                              : D >= 32                      ? 32
                                                             : 16;
        f(Int<kDims>{}, Int<Base>{});
        for_each_chunk<D - kDims, W, Base + kDims>(f);
    }
}

// Calls f(Int<0>) .. f(Int<Count - 1>): the index is a constant in the body.
template <int Count, int Index = 0, typename F>
__device__ __forceinline__ void for_each_index(F&& f) {
    if constexpr (Index < Count) {
        f(Int<Index>{});
        for_each_index<Count, Index + 1>(f);
    }
}

// A lane's piece of `Bytes` (2, 4, 8 or 16) as 32-bit words; 2 bytes are spread to the low bytes of the two halves.
template <int Bytes>
__device__ __forceinline__ void load_piece(std::uint32_t* words, const std::uint8_t* piece) {
    static_assert(Bytes == 2 || Bytes == 4 || Bytes == 8 || Bytes == 16);
    if constexpr (Bytes == 16) {
        const uint4 x = *reinterpret_cast<const uint4*>(piece);
        words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    } else if constexpr (Bytes == 8) {
        const uint2 x = *reinterpret_cast<const uint2*>(piece);
        words[0] = x.x, words[1] = x.y;
    } else if constexpr (Bytes == 4) {
        words[0] = *reinterpret_cast<const std::uint32_t*>(piece);
    } else {
        const std::uint32_t x = *reinterpret_cast<const std::uint16_t*>(piece);
        words[0] = __byte_perm(x, 0, 0x4140);
    }
}

// The codes of one chunk of `Dims` dims held by a lane, for one half (8 tokens) of a block.
template <int Bits, int Dims>
struct ChunkCodes {
    static constexpr int kWidth = plane_width(Bits);
    static constexpr int kPieceBytes = Dims * kWidth / 32;
    static constexpr int kHalfBits = kPieceBytes >= 4 ? 16 : 8;
    static constexpr int kWords = kPieceBytes >= 4 ? kPieceBytes / 4 : 1;
    static constexpr int kHighBytes = Bits == 3 ? Dims / 32 : 0;  // the 1-bit plane
    static constexpr int kClasses = Bits == 16 ? 1 : kHalfBits / 2 / kWidth;
    static_assert(kPieceBytes >= 2 && (Bits != 3 || kHighBytes >= 2), "this chunk is stored as plain rows");

    std::uint32_t low[kWords];
    std::uint32_t high[kHighBytes > 4 ? kHighBytes / 4 : 1];

    // `plane`: the start of the chunk's half in the low plane; `high_plane` the same in the 1-bit plane.
    __device__ __forceinline__ void load(const std::uint8_t* plane, const std::uint8_t* high_plane, int lane) {
        load_piece<kPieceBytes>(low, plane + lane * kPieceBytes);
        if constexpr (Bits == 3) load_piece<kHighBytes>(high, high_plane + lane * kHighBytes);
    }

    // Operand register of mma `I` of the chunk for e = Lo: fp16 pair (h = 0, h = 1), times 2^(24 - Width * class(I)).
    template <int I, int Lo>
    __device__ __forceinline__ std::uint32_t operand() const {
        if constexpr (Bits == 16) {
            return low[2 * I + Lo];
        } else {
            constexpr std::uint32_t kMask = ((1u << kWidth) - 1) * 0x00010001u;
            constexpr int kPlace = kWidth * (I % kClasses);
            const std::uint32_t x = low[I / kClasses];
            std::uint32_t code = (Lo ? x >> (kHalfBits / 2) : x) & (kMask << kPlace);
            if constexpr (Bits == 3) {
                constexpr int kUnit = I / 4;
                constexpr int kShift = 2 - Lo - 8 * (kUnit % 2);  // left if positive
                const std::uint32_t y = high[kUnit / 2];
                code |= (kShift >= 0 ? y << (kShift & 31) : y >> (-kShift & 31)) & (0x00040004u << kPlace);
            }
            return code;
        }
    }
};

// d += a (16 x 16) b (16 x 8), fp16 or bf16 operands, fp32 accumulation.
template <bool Bf16>
__device__ __forceinline__ void mma(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                                    std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
    if constexpr (Bf16) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
}

// Transposes an 8 x 8 matrix of 16-bit elements spread over a warp as mma fragments are.
__device__ __forceinline__ std::uint32_t transpose8x8(std::uint32_t x) {
    std::uint32_t y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// fp16 (or bf16) pair, `low` in the low half.
template <bool Bf16>
__device__ __forceinline__ std::uint32_t pack_pair(float low, float high) {
    std::uint32_t y;
    if constexpr (Bf16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    }
    return y;
}

}  // namespace quarot
