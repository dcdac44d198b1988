// The graph nodes of layers whose neurons are stored in clusters.
#pragma once

#include "ggml.h"

namespace ls {

// src0 a: float32 [n_ff, n_tokens], the activation by position. dst: int32 [1]. Sets activations below the layer's threshold to
// zero, lists the neurons that fire and starts the reads of their clusters.
void op_select_neurons(ggml_tensor * dst, int ith, int nth, void * userdata);
// src0 a, src1 the select node; gated: src2 x [n_embd, n_tokens], src3 x in the type that up rows multiply with, or none.
// dst: float32 [n_embd, n_tokens] = down * a, or down * (a * (up * x)). a is used up.
void op_apply_neurons(ggml_tensor * dst, int ith, int nth, void * userdata);

} // namespace ls
