// Scales of an int8 KV cache, measured on the model itself.
#pragma once

#include <vector>

#include "shoal/model/model.h"
#include "shoal/state/kv_cache.h"

namespace shoal {

// Runs a fixed sequence of at most `max_tokens` tokens, spread over the vocabulary, through the model with an f32 cache
// and takes amax * 1.25 / 127 of what it stored: for K one scale per channel, for V one per tensor. The workspace of
// `context` is enlarged where needed.
//
// K has few channels with large values, and rotary embedding turns a channel into its partner at other positions, so a
// channel's amax is that of itself and its possible partners (i ^ 1, i +- head_dim / 2), and at least 1/64 of the
// layer's, lest a channel that was quiet here saturate later. kModelFormat if the model stores values that are not
// finite.
std::vector<KvScales> calibrate_kv(Model& model, int64_t max_tokens, const OpContext& context);

}  // namespace shoal
