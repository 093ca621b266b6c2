// The compiled shapes: X(MP, T, NS, NG, RING_KB), see shape.cuh for the letters. One shape_<MP>x<T>.cu each.
//
// NG x T x NS warpgroups share 64 K registers: 4 get 128 each, 3 get 168, 6 get 80. Accumulators take MP / (2 NS), the
// A fragments MP / 4. Several groups (NG) beat several warpgroups on one row wherever shared memory allows, since the
// phases of different groups overlap.
#pragma once

#include "hadamard/sm90/shape.cuh"

#define QUAROT_TRANSFORM_SHAPES(X) \
    X(32, 1, 1, 4, 32) \
    X(64, 1, 1, 6, 16) \
    X(112, 1, 1, 4, 32) \
    X(128, 1, 1, 4, 32) \
    X(144, 1, 1, 3, 32) \
    X(176, 1, 1, 3, 32) \
    X(112, 2, 1, 2, 64) \
    X(128, 2, 1, 2, 64) \
    X(160, 2, 2, 1, 64) \
    X(176, 2, 2, 1, 64) \
    X(112, 4, 1, 1, 128)
