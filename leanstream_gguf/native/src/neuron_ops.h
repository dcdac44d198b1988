// The graph nodes of layers whose neurons are stored in clusters.
#pragma once

#include "ggml.h"

namespace ls {

// Layout exact, in place of the deciding product of one token, where what is not above zero cannot fire: src0 weights [n_embd, n_ff],
// src1 x [n_embd, 1], src2 x in the type that rows multiply with, or none; dst: float32 [n_ff, 1]. As ggml's MUL_MAT; reads of what
// fires begin meanwhile. op_params.part as in op_repacked_product.
void op_decide_rows(ggml_tensor * dst, int ith, int nth, void * userdata);

// Layout faithful, three nodes in place of the deciding product:
// src0 x [n_embd, n_tokens]; dst: float32 [n_ff, n_tokens], what the sketch says of the deciding projection.
void op_sketch_neurons(ggml_tensor * dst, int ith, int nth, void * userdata);
// src0 the sketch's scores; dst: int32 [1]. Lists the candidates and starts the reads of their clusters.
void op_select_candidates(ggml_tensor * dst, int ith, int nth, void * userdata);
// src0 scores, src1 the select node, src2 x, src3 x in the type that rows multiply with, or none; dst: float32 [n_ff, n_tokens], the
// deciding projection of the candidates; of the others a number that every activation turns into zero.
void op_decide_neurons(ggml_tensor * dst, int ith, int nth, void * userdata);

// src0 a: float32 [n_ff, n_tokens], the activation by position. dst: int32 [1]. Sets activations below the layer's threshold to
// zero, lists the neurons that fire and starts the reads of their clusters. op_params.part: 1 = the block runs on a device, which may
// sum the layer's leading neurons itself.
void op_select_neurons(ggml_tensor * dst, int ith, int nth, void * userdata);
// src0 a, src1 the select node; gated: src2 x [n_embd, n_tokens], src3 x in the type that up rows multiply with, or none.
// dst: float32 [n_embd, n_tokens] = down * a, or down * (a * (up * x)). a is used up.
void op_apply_neurons(ggml_tensor * dst, int ith, int nth, void * userdata);

} // namespace ls
