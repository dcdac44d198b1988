// What the neuron store knows of guesses about its layers, and of the clusters that were read on them.
#pragma once

#include "neuron_guess.h"
#include "speculation.h"

#include <cstdint>
#include <vector>

namespace ls {

// The last guess about a layer at a lead, until the layer has chosen.
struct NeuronGuess {
    const Session * of = nullptr; // nullptr: none open
    std::vector<float> score;     // [n_ff]; empty: nothing is learnt from this one
    FiringModel model;
};

// One layer.
struct NeuronsAhead {
    NeuronGuess guesses[kLeads];
    Recall recall[kLeads];
    std::vector<uint32_t> waiting;  // units read ahead whose turn comes
    std::vector<uint32_t> hinted;   // units that a prediction makes worth more until then
    uint32_t n_turns = 0;           // of one token
    float    mean_units = 0;        // that a turn uses
};

} // namespace ls
