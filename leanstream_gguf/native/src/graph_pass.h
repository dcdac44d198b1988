// Rewrites a compute graph between its building and its allocation: waits before the first use of each streamed group,
// products that take experts as they arrive, rows read from the file.
#pragma once

#include "session.h"

#include "ggml-backend.h"
#include "ggml.h"

struct ggml_cgraph;

namespace ls {

class Engine;

// ctx0 is the context that holds the graph's tensors. Graphs without weights of this buffer type are left alone. Returns how
// many dense groups the graph needs at one time. Throws Error(LS_ERR_UNSUPPORTED).
uint32_t rewrite_graph(Engine & engine, Session & session, ggml_backend_buffer_type_t buffer_type, ggml_context * ctx0,
                       ggml_cgraph * graph);

} // namespace ls
