// Judging retention without a drive: a policy, or Belady's optimum, over a recorded trace.
#pragma once

#include <cstdint>
#include <string>

namespace ls {

struct ReplayOptions {
    std::string policy;            // as make_policy(), or "belady": gives up what is used last, knowing the future
    std::string params_json;
    uint32_t n_capacity = 0;       // units that fit at once
    uint64_t n_warmup_tokens = 0;  // not counted
};

struct ReplayResult {
    uint64_t n_tokens = 0;     // counted
    uint64_t n_uses = 0;
    uint64_t n_misses = 0;     // uses whose unit was not resident: units read
    uint64_t missed_bytes = 0;
    uint64_t n_oversized = 0;  // turns that needed more units than fit
    double   ns_per_use = 0;   // time in the policy
};

// Throws Error: the trace cannot be read, the policy is unknown, the capacity is 0.
ReplayResult replay(const std::string & trace_path, const ReplayOptions & options);

// JSON: {n_tokens, n_uses, n_units, unit_bytes, layers:[{block, n_units, n_uses, n_hit, n_ahead, n_late, n_missed}],
//        recall:[{lead, block, at_k, at_2k, n}]}: share of the units used among the k and 2k likeliest ones predicted, where k units
// were used; turns of one token only.
std::string trace_summary_json(const std::string & trace_path);

} // namespace ls
