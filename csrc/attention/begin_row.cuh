// What the kernels that also store the new token do first (DecodeParams::append).
#pragma once

#include "attention/attend_stage.cuh"
#include "attention/decode_params.h"
#include "attention/ring.cuh"
#include "attention/schedule.cuh"
#include "kv_cache/rope_row.cuh"

namespace quarot {

// The new token of a row: its queries, normed, turned and rotated, go to shared memory as fp16, and the CTA that reads the
// end of the sequence stores its key and value. Four jobs of one warp each: query heads 0-3, 4-7, key, value.
template <typename C>
__device__ __forceinline__ void begin_row(const DecodeParams& p, const Work& work, bool appends, std::uint16_t* queries,
                                          int warp, int warps, int lane) {
    const RopeAppendParams& a = p.append;
    const int place = lane % 8, row = lane / 8, group = p.query_heads / p.kv_heads, kv_head = work.column;
    for (int job = warp; job < (appends ? 4 : 2); job += warps) {
        float x[C::kD / 8];
        if (job < 2) {
            const bool valid = 4 * job + row < group;
            if (4 * job < group) load_head<C::kD>(a, work.sequence, kv_head * group + (valid ? 4 * job + row : 0), place, x);
            auto* target = reinterpret_cast<std::uint32_t*>(queries + (4 * job + row) * C::kD);
#pragma unroll
            for (int i = 0; i < C::kMmas; ++i) {
                float first = x[2 * i], second = x[2 * i + 1];
                if (a.dtype == DType::kBFloat16) {  // rounded as queries that come through memory
                    first = __bfloat162float(__float2bfloat16_rn(first));
                    second = __bfloat162float(__float2bfloat16_rn(second));
                }
                target[8 * i + place] = valid ? pack_pair<false>(first, second) : 0u;
            }
        } else {
            const bool key = job == 2;
            const int slot = row == 0 ? load_slot(a, work.sequence) : -1;
            load_head<C::kD>(a, work.sequence, a.query_heads + (key ? 0 : a.kv_heads) + kv_head, place, x);
            quantize_and_store_row<C::kD, C::kKeyBits, C::kKeyGroups>(a, key, slot, kv_head, x, lane);
            __threadfence();
#if QUAROT_BULK_COPY
            asm volatile("fence.proxy.async;" ::: "memory");  // the copy engine reads them next
#endif
        }
    }
}

}  // namespace quarot
