// What is different from CUTLASS's main loop: how it reads the tokens.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"

namespace quarot::sm90 {

/// A CUTLASS main loop that may read more tokens than the output has.
///
/// The copy engine fills rows beyond the end of a tensor with zeros, more slowly than it copies them. Where the caller's
/// memory goes on, the tensor is said to be longer; what is read there reaches no output.
template <class Base>
class ReadableTokens : public Base {
public:
    using typename Base::Params;

    struct Arguments : Base::Arguments {
        int tokens = 0;  ///< rows of the activations that may be read
    };

    template <class ProblemShape>
    static Params to_underlying_arguments(ProblemShape const& shape, Arguments const& args, void* workspace) {
        return Base::to_underlying_arguments(cute::replace<1>(shape, args.tokens), args, workspace);
    }
};

}  // namespace quarot::sm90
