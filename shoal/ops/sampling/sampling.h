// From a row of logits to a token: penalties, bias, temperature, top-k, top-p, min-p, a seeded draw, log-probabilities.
//
// Order, as vLLM and the OpenAI API have it: logit bias; repetition, presence and frequency penalties;
// (log-probabilities are those of the raw logits); temperature; top-k; top-p; min-p; draw. temperature 0 takes the
// largest logit, ties to the lower id. top-k: of equal logits the lower ids stay. top-p: the smallest set whose mass
// reaches top_p, of what top-k has left. min-p: at least min_p times the largest probability. The draw inverts the
// distribution over the rest in descending order, ties by id, at a uniform number: Philox4x32-10, key seed, counter
// step.
//
// Types     logits [vocab_size] f32, not changed
// Numerics  softmax in f64 over f32 logits; the draw depends on seed, step and logits only
// Errors    a row with NaN, +inf or nothing but -inf, as given or after bias and penalties, is kNonFinite: a value,
//           not an exception. kInvalidArgument if a token of prompt, output or bias that counts is not in the
//           vocabulary
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "shoal/base/result.h"

namespace shoal {

struct SamplingOptions {
  float temperature = 1.0f;         // >= 0
  int top_k = 0;                    // 0: off
  float top_p = 1.0f;               // (0, 1]
  float min_p = 0.0f;               // [0, 1]
  float repetition_penalty = 1.0f;  // > 0; over prompt and output: logit > 0 ? logit / p : logit * p
  float presence_penalty = 0.0f;    // over output
  float frequency_penalty = 0.0f;   // over output, times the count
  std::vector<std::pair<int32_t, float>> logit_bias{};  // added; -inf bans a token
  uint64_t seed = 0;
  int num_logprobs = -1;  // -1: none; 0: only the chosen token's; n: also the n most likely
};

struct TokenLogprob {
  int32_t id;
  float logprob;  // natural logarithm
};

struct Sampled {
  int32_t id = 0;
  float logprob = 0.0f;             // valid if num_logprobs >= 0
  std::vector<TokenLogprob> top{};  // the num_logprobs most likely, best first
};

enum class SampleFailure : uint8_t { kNonFinite };

// Throws kInvalidArgument naming the option that is out of range. Called once per request.
void check_sampling_options(const SamplingOptions& options, int64_t vocab_size);

// `prompt` and `output` are the request's tokens so far (for penalties); `step` counts its sampled tokens.
Result<Sampled, SampleFailure> sample(std::span<const float> logits, const SamplingOptions& options,
                                      std::span<const int32_t> prompt, std::span<const int32_t> output, uint64_t step);

}  // namespace shoal
