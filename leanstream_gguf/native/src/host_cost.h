// Computing a missing expert on the host against copying it to the device: what each costs, and how a layer's missing experts
// are divided between the two. Only in the mode that may change bits (ls_options.device_inexact).
#pragma once

#include "weights.h"

#include "ggml-backend.h"

#include <cstdint>
#include <functional>
#include <vector>

namespace ls {

// How many of n experts to compute on the host while the others are copied, so that the later of the two is done first.
// cost: of computing one, in copies of one. At equal times fewer, for a copy is kept on the device.
uint32_t host_share(uint32_t n, double cost);

// Some experts of a layer that are in host memory.
struct HostExperts {
    const MoeLayer & layer;
    std::vector<uint32_t> experts;
    std::function<const uint8_t *(uint32_t part, uint32_t expert)> memory;
};

// That cost, measured with n_threads, as a power of two: what is computed where, and so the bits, does not follow small differences
// between two runs. stage: [part] room for the layer's experts on the device.
double measure_host_cost(const HostExperts & host, const std::vector<ggml_tensor *> & stage, ggml_backend_t backend, int n_threads);

} // namespace ls
