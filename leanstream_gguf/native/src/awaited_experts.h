// Experts of a single token that were not in memory when their layer chose them. The layer's products go ahead with the others;
// the last one computes these from their input to their output as they arrive, so that reads are hidden behind all that the layer
// can compute without them. After each stage the outputs that are complete give a better guess about the next layer.
// The same kernels on the same numbers, so the same bits.
#pragma once

#include "session.h"

#include "ggml.h"

#include <cstddef>

namespace ls {

class Engine;
struct MoeLayer;

// Sources of a down product that awaits, behind those of op_mul_mat_id (ops.h).
enum AwaitedSource {
    kAwaitedInput    = 5, // of the gate's and up's products, kept until now
    kAwaitedWeights  = 6, // float32 [1, n_used, 1] of the experts' outputs, or none
    kAwaitedResidual = 7, // float32 [n_embd] before the FFN, or none
};

// A product and the threads in it.
struct AwaitedProduct {
    ggml_tensor * down; // src1 is the activation node, whose sources are the products of gate and up
    Session & session;
    Engine & engine;
    MoeRun & run;
    int ith, nth;
};

// Is this down product of a graph, whose gate and up are rewritten already, the end of a plain gated FFN of one token?
bool can_await(const ggml_tensor * down);

// every thread, after its share of the experts that are here
void compute_awaited(const AwaitedProduct & op);
// every thread, when its share of experts[k]'s output is complete
void note_summed(const AwaitedProduct & op, uint32_t k);

// scratch for one awaited expert of this layer
size_t awaited_bytes(const MoeLayer & layer);

} // namespace ls
