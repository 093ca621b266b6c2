// Entry point of the integer GEMMs: one call for every weight format, architecture and number of tokens.
#pragma once

#include "gemm/dispatch.h"
#include "gemm/skinny.h"

#include <cstddef>

namespace quarot {

/// out[m, n] = ((float)sum_k codes[m, k] * w[n, k]) * row_scale[m] * weight_scale[n] + bias[n], exact until the float
/// steps.
struct GemmCall {
    SkinnyProblem
        problem;  ///< pointers and sizes; `codes` is int4 [m, k / 2] and `weight` int4 [n, k / 2] if packed_activations
    bool packed_activations;
    void* workspace;  ///< device memory of at least gemm_scratch().bytes, or null if that is 0
    std::size_t workspace_bytes;
    int readable_rows;   ///< rows of `codes` that may be read, at least m; what those from m on hold does not matter
    unsigned* counters;  ///< gemm_scratch().counters zeros, or null if that is 0; zeros again after the call
};

/// Device memory a call needs beside its operands.
struct GemmScratch {
    std::size_t bytes = 0;     ///< needs no initialisation
    std::size_t counters = 0;  ///< of 32 bits, zero
};

/// The kernel the call would run on the current device.
GemmChoice gemm_choice(GemmCall const& call);

GemmScratch gemm_scratch(GemmCall const& call, GemmChoice const& choice);

/// Launches on `problem.stream`; allocates nothing, synchronises nothing. An impossible combination is
/// cudaErrorInvalidValue.
cudaError_t gemm(GemmCall const& call, GemmChoice const& choice);

}  // namespace quarot
