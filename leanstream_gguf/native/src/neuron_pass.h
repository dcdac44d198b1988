// Finds the feed-forward layers of a graph whose neurons are stored in clusters.
#pragma once

#include "ggml.h"

#include <vector>

struct ggml_cgraph;

namespace ls {

class NeuronStore;
class Weights;

// down = MUL_MAT(W_down, h), where h = act(deciding) or act(gate) * MUL_MAT(W_up, x).
struct NeuronMatch {
    ggml_tensor * down = nullptr;  // becomes the node that sums columns
    ggml_tensor * a = nullptr;     // act(deciding), a node that stays; for a GLU the GLU itself, turned into its activation
    ggml_tensor * deciding = nullptr; // layout faithful: the product that decides
    ggml_tensor * up = nullptr;    // gated: the product that is left out
    ggml_tensor * product = nullptr; // gated with a MUL: the node that is left out
    ggml_unary_op activation = GGML_UNARY_OP_COUNT; // of a GLU
    int32_t layer = -1;            // of the store
};

// Throws Error(LS_ERR_UNSUPPORTED) if rearranged weights are used in any other way. Changes nothing.
std::vector<NeuronMatch> find_neurons(const ggml_cgraph * graph, Weights & weights, const NeuronStore & store);

// Turns the GLU of a match into its activation.
void make_activation(NeuronMatch & match);

} // namespace ls
