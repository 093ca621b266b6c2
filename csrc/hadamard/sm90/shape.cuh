// The shapes that the tensor-core transform is compiled for.
//
// A row of n = m * b elements is the matrix X[m][b]; the transform is H_m on the left and Sylvester's H_b on the right,
// b = 64 T. Everything of the Sylvester factor beyond 256 is folded into H_m by the host (H_512 = H_4 (x) H_128).
#pragma once

namespace quarot::sm90 {

// MP: m padded to a multiple of 16 (fits m <= MP).   T: 64-column tiles of b (1, 2 or 4).
// NS: warpgroups that share the MP output rows of one tile.   NG: independent groups of warpgroups, one token row each.
// RING_KB: shared memory for input in flight, per group.
template <int MP_, int T_, int NS_, int NG_, int RING_KB>
struct Shape {
    static constexpr int MP = MP_, T = T_, NS = NS_, NG = NG_;
    static constexpr int kWarpgroups = T * NS;           // of one group
    static constexpr int kWarps = 4 * kWarpgroups;       // of one group
    static constexpr int kGroupThreads = 32 * kWarps;
    static constexpr int kThreads = NG * kGroupThreads;
    static constexpr int N = MP / NS;                    // accumulator columns of one warpgroup
    static constexpr int kSteps = MP / 16;
    static constexpr int kBatches = kThreads >= 512 && MP > 112 ? 2 : 1;  // 128 registers do not hold all A fragments
    static constexpr int kTileElements = 512 * T;        // what one warp takes at a time: 8 rows of X
    static constexpr bool kStaged = T == 4;  // codes leave through shared memory: one group, its stores are not hidden
    static constexpr int kTableBytes = MP * MP * 2;
    static constexpr int kXBytes = T * MP * 128;
    static constexpr int kRingBytes = RING_KB * 1024;
    static constexpr int kSharedBytes = kTableBytes + NG * (kXBytes + kRingBytes);
    static_assert(MP % 16 == 0 && N % 8 == 0 && N <= 256 && (T == 1 || T == 2 || T == 4));
    static_assert(kSharedBytes <= 227 * 1024 - 2048);
};

}  // namespace quarot::sm90
