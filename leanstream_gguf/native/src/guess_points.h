// Where in a graph a layer's choice of experts can be guessed before it is made.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

struct ggml_cgraph;

namespace ls {

class Engine;

struct GuessPoints {
    std::unordered_map<const ggml_tensor *, const ggml_tensor *> logits; // of a routing decision's ids
    std::unordered_map<const ggml_tensor *, std::vector<std::pair<int32_t, uint8_t>>> at; // [residual] layer and lead
    std::vector<ggml_tensor *> before_ffn; // [layer] residual, float32 [n_embd, 1]; nullptr: how the layer routes is not understood
};

// Points at each layer's input, and before the FFNs of the one and two layers before. Only for single tokens: a batch uses most
// experts anyway. Tells the engine how each layer routes.
GuessPoints find_guess_points(Engine & engine, ggml_backend_buffer_type_t buffer_type, const ggml_cgraph * graph);

} // namespace ls
