// The compiled shapes of the transform of many rows: X(MP, T, NG, SLOTS, UPS, STAGED), see direct.cuh for the letters.
// One direct_<MP>x<T>.cu each. 28672 has none: with T = 4 a group fills the SM, and gains nothing (NOTES.md).
#pragma once

#define QUAROT_DIRECT_SHAPES(X) \
    X(176, 1, 3, 7, 3, false) \
    X(112, 2, 2, 7, 3, true)

namespace quarot::sm90 {

template <int MP, int T, int NG, int SLOTS, int UPS, bool STAGED>
struct DirectShape;

}  // namespace quarot::sm90
