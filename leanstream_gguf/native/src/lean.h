// What a repacked file (docs/lean_format.md) says of itself: tensors that are stored in another form, and neuron layers.
#pragma once

#include "ggml.h"

#include <cstdint>
#include <string>
#include <vector>

struct gguf_context;

namespace ls {

struct Index;

// One layer whose feed-forward neurons are stored in clusters.
struct NeuronShape {
    static constexpr uint64_t kAbsent = UINT64_MAX;

    struct Part {                     // of a neuron's record
        ggml_type type = GGML_TYPE_F32;
        uint64_t  at = kAbsent;       // offset in the record
        uint64_t  n_bytes = 0;
        bool present() const { return at != kAbsent; }
    };

    int32_t  block = -1;
    bool     gated = false;
    uint32_t n_ff = 0, n_embd = 0;
    uint32_t cluster_size = 0;        // neurons of a cluster
    uint32_t n_clusters = 0;
    uint32_t n_hot = 0;               // leading clusters that are hot
    uint32_t n_device = 0;            // leading neurons that the file holds once more, as matrices for a device
    float    density = 0;             // measured share of neurons that fire
    float    sketch_margin = 0;
    uint64_t record_bytes = 0;
    uint64_t stride = 0;              // from one cluster to the next in the file
    Part deciding;                    // present in layout faithful only
    Part other;                       // gated: the up row
    Part down;                        // the transposed column
    // indices into Index::tensors; -1 = absent
    int32_t clusters = -1, checksums = -1, perm = -1, planes = -1, sketch = -1, device_up = -1, device_down = -1;

    uint64_t cluster_bytes() const { return cluster_size * record_bytes; } // without the padding to stride
};

// A lossy setting that calibration measured.
struct ThresholdSetting {
    float max_kl = 0, kl = 0;
    std::vector<float> values; // [neuron layer]
};

struct LeanFile {
    bool present = false;
    bool faithful = false; // layout: the deciding projection is in the clusters too
    std::vector<NeuronShape> layers;
    std::vector<ThresholdSetting> thresholds;

    const NeuronShape * layer_of(int32_t block) const;
};

// Reads leanstream.* keys, adds the rearranged tensors to the index, checks that all fits together. Throws
// Error(LS_ERR_FORMAT). A file without these keys is left alone.
void read_lean(const gguf_context * g, Index & index);

// The tensor table that llama.cpp shall see: the file's own, without ours and with the rearranged tensors under their names.
// As gguf_init_from_file(): *out_ctx gets a context with the tensors. nullptr if the file cannot be read.
gguf_context * open_lean(const Index & index, ggml_context ** out_ctx);

} // namespace ls
