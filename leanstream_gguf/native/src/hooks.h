// The bodies of the call sites that patches/ inserts into llama.cpp.
#pragma once

struct ls_model;

namespace ls {

// Throws Error: LS_ERR_STATE if somebody else's hooks are set, LS_ERR_UNSUPPORTED for another hook version.
void install_hooks();

// Models and contexts made on this thread until load_end() are this model's.
void load_begin(ls_model & model);
void load_end();
// Ends this thread's load if it is that of a model about to be deleted.
void load_abandon(const ls_model * model);

} // namespace ls
