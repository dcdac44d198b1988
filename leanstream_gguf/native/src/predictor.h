// Which experts a layer will choose, guessed from the residual stream before it gets there: the layer's own router, applied early.
// Training-free; scale and per-expert offsets of the guess are learnt while the model runs (n_experts + 1 floats for each layer and
// lead: what attention and the FFN between will add is much the same for every token). Guesses move reads, never results.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <vector>

namespace ls {

// How a layer turns the residual into scores, as found in a graph.
struct Router {
    enum class Gate : uint8_t { logits, sigmoid };

    const ggml_tensor * matrix = nullptr;  // [n_embd, n_experts]; nullptr: not understood, and nothing is predicted
    const ggml_tensor * norm = nullptr;    // float32 [n_embd] weights of an RMS norm, or nullptr: the residual as it is
    const ggml_tensor * bias = nullptr;    // float32 [n_experts] added to the logits, or nullptr
    const ggml_tensor * choice_bias = nullptr; // float32 [n_experts] added to the gate's output for the choice, or nullptr
    Gate  gate = Gate::logits;             // softmax keeps the order of its logits
    float norm_eps = 0.0f;
    uint32_t n_used = 0;

    // Scores r0 .. r1 of one token: residual float32 [n_embd], scratch at least scratch_bytes(). What selection orders by.
    void scores(const float * residual, uint8_t * scratch, float * out, int64_t r0, int64_t r1) const;
    size_t scratch_bytes() const;
    // logits float32 [n_experts] as the graph computed them -> scores
    void finish(const float * logits, float * out, int64_t r0, int64_t r1) const;
};

// `ids` of a routing decision -> how it was made, and in `logits` the node that holds the product with the router's matrix.
Router find_router(const ggml_tensor * ids, const ggml_tensor *& logits);

// scores [n] -> score less the border between the k chosen and the others
void margins(const float * scores, uint32_t n, uint32_t k, std::vector<float> & out);

// Scores to probabilities, by logistic regression that goes on learning.
class Calibration {
public:
    void reset(uint32_t n_experts) { scale_ = 1.5f; offset_.assign(n_experts, 0.0f); }
    void probabilities(const std::vector<float> & margin, std::vector<float> & p) const;
    // used: [n] 1 for those that the layer chose
    void learn(const std::vector<float> & margin, const std::vector<float> & p, const std::vector<uint8_t> & used);

private:
    float scale_ = 1.5f;
    std::vector<float> offset_;
};

} // namespace ls
