// Weights in the row-interleaved form of llama.cpp's own CPU kernels, its buffer type CPU_REPACK.
#pragma once

#include "repacked_kernels.h"
#include "weights.h"

#include <deque>

namespace ls {

// A weight that is only ever multiplied gets a twin: the same memory, described as one of CPU_REPACK's tensors, which graphs
// multiply with. What is in memory is rewritten in place once, so nothing of it may stream.
class Repacked {
public:
    Repacked(); // throws Error(LS_ERR_UNSUPPORTED)
    ~Repacked();
    Repacked(const Repacked &) = delete;
    Repacked & operator=(const Repacked &) = delete;

    // nullptr: it is used in other ways too, or llama.cpp has no such kernel for its type and shape on this processor
    ggml_tensor * twin(Weight & w);
    // The kernel of this library for a twin, with the bits of llama.cpp's; nullptr: there is none that is faster
    RepackedFn kernel(const ggml_tensor & twin) const; // or for its weight: it is the same memory
    // Rewrites every weight that has a twin; all of them are at home, as in the file.
    void convert(Weights & weights);

private:
    ggml_backend_buffer_t buffer_ = nullptr; // what makes a tensor one of CPU_REPACK's; holds nothing
    std::deque<ggml_tensor> twins_;
};

} // namespace ls
