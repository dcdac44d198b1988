// Which neurons a layer will fire, guessed before it gets there: its own deciding projection, or the sketch of it that the file has,
// applied to the residual stream as it is an attention block or a layer earlier. Training-free; one scale, and an offset for each
// neuron, are learnt while the model runs. Guesses move reads, never results.
#pragma once

#include "neuron_pass.h"

#include "ggml.h"

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ls {

class Engine;
struct NeuronLayer;

// How a layer turns the residual into what decides, as found in a graph.
struct Decider {
    const ggml_tensor * residual = nullptr; // of the graph at hand only: before the feed-forward network
    const ggml_tensor * matrix = nullptr;   // layout exact: the deciding projection [n_embd, n_ff]; nullptr: the sketch
    int32_t group = -1;                     // dense group of the matrix, -1 = always resident
    const ggml_tensor * norm = nullptr;     // float32 [n_embd] weights of the norm before it
    const ggml_tensor * norm_bias = nullptr, * bias = nullptr; // float32 or none
    float eps = 0;
    bool  centred = false;                  // LayerNorm; else RMS
    bool  zeros = false;                    // the activation is exactly zero below zero
    ggml_unary_op activation = GGML_UNARY_OP_COUNT; // without zeros: whose size counts
    bool  known = false;                    // all of it was understood

    size_t scratch_floats(uint32_t n_embd) const { return 3 * size_t(n_embd) + 64; }
    // Neurons r0 .. r1 by position: above zero is a guess that it fires (layout faithful: becomes a candidate). residual float32
    // [n_embd], threshold of the layer, scratch at least scratch_floats() floats.
    void scores(const NeuronLayer & layer, const float * residual, float threshold, float * scratch, float * out, uint32_t r0, uint32_t r1) const;
};

// Scores to probabilities, by logistic regression that goes on learning. 2 bytes for a neuron.
class FiringModel {
public:
    void reset(uint32_t n_ff) { offset_.assign(n_ff, 0); scale_ = 2.0f; size_ = 0.0f; }
    // p: [n_ff]
    void probabilities(const float * score, std::vector<float> & p) const;
    // fired: [n_ff] 1 for those that did
    void learn(const float * score, const std::vector<uint8_t> & fired);
    // before the first probabilities(), and now and then: how large scores are
    void note_size(const float * score);

private:
    static constexpr float kStep = 1.0f / 1024; // of an offset

    std::vector<int16_t> offset_;
    float scale_ = 2.0f, size_ = 0.0f;
};

// [residual] layers of the store and leads
using NeuronGuessPoints = std::unordered_map<const ggml_tensor *, std::vector<std::pair<int32_t, uint8_t>>>;

// Layout exact: the product of which every value above zero, and no other, makes a neuron fire; nullptr: another form.
const ggml_tensor * plain_deciding_product(const NeuronMatch & m);

// Points at each layer's input, and before the feed-forward networks one and two layers before; for single tokens. Tells the store
// how each layer decides.
NeuronGuessPoints find_neuron_guess_points(Engine & engine, const std::vector<NeuronMatch> & matches, const ggml_cgraph * graph);

// src0 residual: float32 [n_embd, 1]; dst: float32 [n_ff] scores of a layer that comes later. Nothing depends on it.
void op_guess_neurons(ggml_tensor * dst, int ith, int nth, void * userdata);

} // namespace ls
