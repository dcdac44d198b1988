// Matrices of a lean file that only a device uses: llama.cpp does not know them, so their tensors are made here.
#pragma once

#include "memory.h"

struct ggml_context;

namespace ls {

struct Index;
class Weights;

class DeviceNeuronTensors {
public:
    DeviceNeuronTensors(const Index & index, Weights & weights); // adds them to the weights
    ~DeviceNeuronTensors();
    DeviceNeuronTensors(const DeviceNeuronTensors &) = delete;

private:
    ggml_context * ctx_ = nullptr;
    AddressSpace   space_; // their homes, for those that pass through host memory
};

} // namespace ls
