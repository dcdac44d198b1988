// Which neurons of rearranged layers count as zero. A setting is a value: a graph takes the one in force when it begins, so that a
// change can come from any thread at any time.
#pragma once

#include "index.h"

#include <cstdint>
#include <string>
#include <vector>

namespace ls {

struct Fidelity {
    enum class Kind : uint32_t { exact = 0, faithful = 1, threshold = 2 }; // as ls_options.fidelity

    Kind  kind = Kind::exact;
    float max_kl = 0, kl = 0;      // threshold: of the measured setting; 0 = not measured
    std::vector<float> thresholds; // [neuron layer] smaller absolute activations count as zero
};

// The measured setting for a kind and, of `threshold`, the largest max_kl up to the one given (0: the smallest there is).
// Throws Error(LS_ERR_UNSUPPORTED) if the file does not hold what that needs, Error(LS_ERR_ARGUMENT) for what is no fidelity.
Fidelity choose_fidelity(const Index & index, uint32_t kind, double max_kl);

// values[i] for block blocks[i], the other layers as they are; blocks nullptr: values[0] for all of them. max_kl > 0: none of them
// above what was measured for that; without values: those that were. As ls_model_set_thresholds() throws.
Fidelity change_thresholds(const Index & index, const Fidelity & now, const int32_t * blocks, const float * values, size_t n_values,
                           double max_kl);

// as ls_model_fidelity_json()
std::string fidelity_json(const Index & index, const Fidelity & fidelity);

} // namespace ls
