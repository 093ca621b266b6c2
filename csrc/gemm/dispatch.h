// Which kernel serves which size, in one place. The numbers behind the choices are in NOTES.md, "Dispatch".
#pragma once

namespace quarot {

enum class GemmKernel : int {
    kSkinny = 0,     ///< mma.sync, any architecture; a = tokens a pass, b = warps, c = blocks an SM
    kWide = 1,       ///< sm_90a CUTLASS, int8 weights; a = channels, b = tokens of the tile, c = its swizzle (0: by launch.h)
    kGrouped = 2,    ///< mma.sync with one scale a group
    kInt4Cores = 3,  ///< sm_80/86/89 INT4 tensor cores on packed activations; a = tokens, b = channels of the tile
    kTile = 4,       ///< mma.sync for many tokens, int4 tiles, any architecture, group scales (multiples of 64) or none
    kSplit = 5,      ///< kWide with K cut among blocks; a = channels, b = tokens of the tile, c = parts of K
    kWideGroups = 6,  ///< sm_90a, int4 tiles, group scales (multiples of 64); a = channels, b = tokens
    kRing = 7,  ///< sm_90a, int4 tiles; a, b likewise, c = blocks that share the K of a tile (0: one)
};

struct GemmChoice {
    GemmKernel kernel;
    int a = 0;
    int b = 0;
    int c = 0;
};

/// What the choice depends on.
struct GemmSize {
    int m;
    int n;
    int k;
    bool int4_weight;         ///< int4 tiles, else int8 rows
    int group_size;           ///< K of one weight scale, 0 = one scale a channel
    bool packed_activations;  ///< int4 activations, two a byte
    bool float32_out;
    bool vector_rows;  ///< the output's rows are multiples of 8 elements
    int capability;    ///< 10 * major + minor
    int sm_count;
};

GemmChoice choose_gemm(GemmSize const& size);

}  // namespace quarot
