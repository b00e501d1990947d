// Sampling: filters are sets, not sorts. What a row of 262,144 logits needs is found by selection: the largest k
// through the maxima of blocks, the smallest set of a given mass through a histogram and a weighted quickselect.
#include "shoal/ops/sampling/sampling.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include "shoal/base/checked.h"
#include "shoal/cpu/isa.h"
#include "shoal/ops/sampling/philox.h"

namespace shoal {

SHOAL_DECLARE_FOR_EACH_ISA(bool sampling_block_maxima(const float* logits, int64_t count, float* maxima);
                           void sampling_weights(const float* logits, int64_t count, float most,
                                                 double inverse_temperature, double* weights))

namespace {

constexpr int64_t kBlock = 64;  // logits that share a maximum: sampling_cpu.cpp
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A row and the maxima of its blocks.
struct Row {
  std::span<const float> logits;
  std::vector<float> maxima;
  float most = -kInfinity;
  bool usable = false;  // nothing NaN or +inf, something above -inf

  explicit Row(std::span<const float> values)
      : logits(values), maxima(ceil_div(values.size(), static_cast<size_t>(kBlock))) {
    const bool numbers = SHOAL_PICK_ISA(cpu::available_isas().back(), sampling_block_maxima)(
        logits.data(), static_cast<int64_t>(logits.size()), maxima.data());
    for (const float maximum : maxima) {
      most = std::max(most, maximum);
    }
    usable = numbers && most > -kInfinity;
  }

  // The first of the largest logits.
  int32_t argmax() const {
    const size_t block = static_cast<size_t>(std::find(maxima.begin(), maxima.end(), most) - maxima.begin());
    const auto begin = logits.begin() + static_cast<std::ptrdiff_t>(block * kBlock);
    return static_cast<int32_t>(std::find(begin, logits.end(), most) - logits.begin());
  }
};

void weights_of(std::span<const float> logits, float most, double inverse_temperature, double* weights) {
  SHOAL_PICK_ISA(cpu::available_isas().back(), sampling_weights)
  (logits.data(), static_cast<int64_t>(logits.size()), most, inverse_temperature, weights);
}

// Calls body(first id, logits, weights) for pieces of the row.
template <class Body>
void for_each_piece(const Row& row, double inverse_temperature, Body&& body) {
  constexpr size_t kPiece = 512;
  std::array<double, kPiece> weights;
  for (size_t first = 0; first < row.logits.size(); first += kPiece) {
    const auto piece = row.logits.subspan(first, std::min(kPiece, row.logits.size() - first));
    weights_of(piece, row.most, inverse_temperature, weights.data());
    body(first, piece, std::span<const double>(weights.data(), piece.size()));
  }
}

// Ascending keys are descending logits, ties by ascending id; all keys of a row differ.
uint64_t key_of(float logit, size_t id) {
  const uint32_t bits = std::bit_cast<uint32_t>(logit + 0.0f);  // -0 becomes 0
  const uint32_t ascending = bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
  return (uint64_t{~ascending} << 32) | static_cast<uint32_t>(id);
}
int32_t id_of(uint64_t key) { return static_cast<int32_t>(static_cast<uint32_t>(key)); }

// Keys of the k largest logits above -inf, in no order; fewer if there are fewer.
std::vector<uint64_t> largest_keys(const Row& row, size_t k) {
  // k blocks whose maximum is at least the k-th largest maximum hold k logits that are: nothing smaller is among the k.
  float threshold = std::numeric_limits<float>::lowest();
  if (k <= row.maxima.size()) {
    std::vector<float> maxima = row.maxima;
    const auto kth = maxima.begin() + static_cast<std::ptrdiff_t>(k - 1);
    std::nth_element(maxima.begin(), kth, maxima.end(), std::greater<>());
    threshold = std::max(threshold, *kth);
  }
  std::vector<uint64_t> keys;
  for (size_t block = 0; block < row.maxima.size(); ++block) {
    if (row.maxima[block] < threshold) {
      continue;
    }
    const size_t end = std::min(row.logits.size(), (block + 1) * kBlock);
    for (size_t id = block * kBlock; id < end; ++id) {
      if (row.logits[id] >= threshold) {
        keys.push_back(key_of(row.logits[id], id));
      }
    }
  }
  if (keys.size() > k) {
    std::nth_element(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(k - 1), keys.end());
    keys.resize(k);
  }
  return keys;
}

struct Candidate {
  uint64_t key;
  double weight;  // exp((logit - largest) / temperature): the largest has 1
  bool operator<(const Candidate& other) const { return key < other.key; }
};

double mass_of(std::span<const Candidate> candidates) {
  double mass = 0.0;
  for (const Candidate& candidate : candidates) {
    mass += candidate.weight;
  }
  return mass;
}

// Reorders so that the first m candidates are the smallest set of the most probable ones whose mass reaches `target`,
// the least probable of them last; returns m. All of them if no set does.
size_t prefix_reaching(std::span<Candidate> candidates, double target) {
  size_t begin = 0;
  size_t end = candidates.size();
  double mass = 0.0;  // of [0, begin), which are before all the others
  while (end - begin > 64) {
    const uint64_t a = candidates[begin].key;
    const uint64_t b = candidates[begin + (end - begin) / 2].key;
    const uint64_t c = candidates[end - 1].key;
    const uint64_t pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));  // the median: both sides get some
    const auto first = candidates.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto middle = std::partition(first, candidates.begin() + static_cast<std::ptrdiff_t>(end),
                                       [pivot](const Candidate& candidate) { return candidate.key < pivot; });
    const size_t split = static_cast<size_t>(middle - candidates.begin());
    const double mass_before = mass + mass_of(candidates.subspan(begin, split - begin));
    if (mass_before >= target) {
      end = split;
    } else {
      mass = mass_before;
      begin = split;
    }
  }
  std::sort(candidates.begin() + static_cast<std::ptrdiff_t>(begin),
            candidates.begin() + static_cast<std::ptrdiff_t>(end));
  while (begin < end) {
    mass += candidates[begin++].weight;
    if (mass >= target) {
      break;
    }
  }
  return begin;
}

std::vector<Candidate> candidates_of_top_k(const Row& row, size_t k, double inverse_temperature) {
  const std::vector<uint64_t> keys = largest_keys(row, k);
  std::vector<float> logits;
  logits.reserve(keys.size());
  for (const uint64_t key : keys) {
    logits.push_back(row.logits[static_cast<size_t>(id_of(key))]);
  }
  std::vector<double> weights(keys.size());
  weights_of(logits, row.most, inverse_temperature, weights.data());
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (weights[i] > 0.0) {
      candidates.push_back({keys[i], weights[i]});
    }
  }
  return candidates;
}

// The most probable candidates of the whole row, at least as many as reach `share` of its mass; `mass` becomes that of
// the row. Those of a weight below `least_weight` may be left out. A histogram over the distance to the largest logit,
// in steps of 1/8, bounds what has to be gathered.
std::vector<Candidate> candidates_of_share(const Row& row, double share, double least_weight,
                                           double inverse_temperature, double& mass) {
  constexpr int kSteps = 256;
  std::array<double, kSteps> even{};  // two histograms: one alone would wait for its own last store
  std::array<double, kSteps> odd{};
  const auto step_of = [&](float logit) {
    const double distance = (static_cast<double>(row.most) - static_cast<double>(logit)) * inverse_temperature;
    return static_cast<int>(std::min(distance * 8.0, kSteps - 1.0));
  };
  for_each_piece(row, inverse_temperature, [&](size_t, std::span<const float> logits, std::span<const double> weights) {
    for (size_t i = 0; i < logits.size(); ++i) {
      (i % 2 == 0 ? even : odd)[static_cast<size_t>(step_of(logits[i]))] += weights[i];
    }
  });
  mass = 0.0;
  for (int step = 0; step < kSteps; ++step) {
    even[static_cast<size_t>(step)] += odd[static_cast<size_t>(step)];
    mass += even[static_cast<size_t>(step)];
  }
  int last_step = 0;
  for (double reached = even[0]; reached < share * mass && last_step < kSteps - 1;) {
    reached += even[static_cast<size_t>(++last_step)];
  }
  if (least_weight > 0.0) {
    last_step = std::min(last_step, static_cast<int>(std::min(1.0 - 8.0 * std::log(least_weight), kSteps - 1.0)));
  }
  std::vector<Candidate> candidates;
  const double farthest = last_step == kSteps - 1 ? std::numeric_limits<double>::infinity() : (last_step + 1) / 8.0;
  for (size_t block = 0; block < row.maxima.size(); ++block) {
    const size_t end = std::min(row.logits.size(), (block + 1) * kBlock);
    if (step_of(row.maxima[block]) > last_step) {
      continue;
    }
    std::array<double, kBlock> weights;
    const auto logits = row.logits.subspan(block * kBlock, end - block * kBlock);
    weights_of(logits, row.most, inverse_temperature, weights.data());
    for (size_t i = 0; i < logits.size(); ++i) {
      const double distance = (static_cast<double>(row.most) - static_cast<double>(logits[i])) * inverse_temperature;
      if (distance < farthest && weights[i] > 0.0 && weights[i] >= least_weight) {
        candidates.push_back({key_of(logits[i], block * kBlock + i), weights[i]});
      }
    }
  }
  return candidates;
}

int32_t draw(const Row& row, const SamplingOptions& options, uint64_t step) {
  const double inverse_temperature = 1.0 / static_cast<double>(options.temperature);
  const double uniform = philox_uniform(options.seed, step);
  const double top_p = options.top_p;
  const bool has_top_k = options.top_k > 0 && static_cast<size_t>(options.top_k) < row.logits.size();
  std::vector<Candidate> candidates;
  double mass = 0.0;
  if (has_top_k) {
    candidates = candidates_of_top_k(row, static_cast<size_t>(options.top_k), inverse_temperature);
    mass = mass_of(candidates);
  } else {
    // Without top-p and min-p the draw is already known as a share of the mass, so nothing beyond it is gathered.
    const double share = top_p < 1.0 ? top_p : options.min_p > 0.0f ? 1.0 : uniform;
    const double least_weight = top_p < 1.0 ? 0.0 : options.min_p;
    candidates = candidates_of_share(row, share, least_weight, inverse_temperature, mass);
  }
  if (top_p < 1.0) {
    candidates.resize(prefix_reaching(candidates, top_p * mass));
  }
  if (options.min_p > 0.0f) {
    std::erase_if(candidates, [&](const Candidate& candidate) { return candidate.weight < options.min_p; });
  }
  if (top_p < 1.0 || options.min_p > 0.0f) {
    mass = mass_of(candidates);
  }
  return id_of(candidates[prefix_reaching(candidates, uniform * mass) - 1].key);
}

// Logit bias, then penalties; empty if there is nothing to change.
std::vector<float> adjusted(std::span<const float> logits, const SamplingOptions& options,
                            std::span<const int32_t> prompt, std::span<const int32_t> output) {
  const bool repetition = options.repetition_penalty != 1.0f && !(prompt.empty() && output.empty());
  const bool counted = (options.presence_penalty != 0.0f || options.frequency_penalty != 0.0f) && !output.empty();
  std::vector<float> result;
  if (options.logit_bias.empty() && !repetition && !counted) {
    return result;
  }
  result.assign(logits.begin(), logits.end());
  const auto index_of = [&](std::string_view what, int32_t id) {
    require(id >= 0 && static_cast<size_t>(id) < logits.size(), "sample: ", what, " holds token ", id,
            ", outside [0, vocab_size = ", logits.size(), ")");
    return static_cast<size_t>(id);
  };
  for (const auto& [id, bias] : options.logit_bias) {
    result[index_of("logit_bias", id)] += bias;
  }
  if (repetition) {
    std::vector<uint8_t> seen(logits.size());
    for (const auto& [name, tokens] : {std::pair{"prompt", prompt}, {"output", output}}) {
      for (const int32_t token : tokens) {
        const size_t id = index_of(name, token);
        if (seen[id] == 0) {
          seen[id] = 1;
          result[id] =
              result[id] > 0.0f ? result[id] / options.repetition_penalty : result[id] * options.repetition_penalty;
        }
      }
    }
  }
  if (counted) {
    std::vector<int32_t> counts(logits.size());
    for (const int32_t token : output) {
      ++counts[index_of("output", token)];
    }
    for (const int32_t token : output) {
      const size_t id = static_cast<size_t>(token);
      result[id] -= options.frequency_penalty * static_cast<float>(counts[id]);
      result[id] -= counts[id] > 0 ? options.presence_penalty : 0.0f;
      counts[id] = 0;  // once for each token
    }
  }
  return result;
}

void add_logprobs(const Row& raw, int num_logprobs, Sampled& sampled) {
  double mass = 0.0;
  for_each_piece(raw, 1.0, [&](size_t, std::span<const float>, std::span<const double> weights) {
    std::array<double, 4> sums{};  // four chains, since the additions wait for each other
    for (size_t i = 0; i < weights.size(); ++i) {
      sums[i % 4] += weights[i];
    }
    mass += (sums[0] + sums[1]) + (sums[2] + sums[3]);
  });
  const double log_mass = static_cast<double>(raw.most) + std::log(mass);
  const auto logprob = [&](int32_t id) {
    return static_cast<float>(static_cast<double>(raw.logits[static_cast<size_t>(id)]) - log_mass);
  };
  sampled.logprob = logprob(sampled.id);
  if (num_logprobs > 0) {
    std::vector<uint64_t> keys = largest_keys(raw, static_cast<size_t>(num_logprobs));
    std::sort(keys.begin(), keys.end());
    for (const uint64_t key : keys) {
      sampled.top.push_back({id_of(key), logprob(id_of(key))});
    }
  }
}

}  // namespace

void check_sampling_options(const SamplingOptions& options, int64_t vocab_size) {
  const auto number = [](std::string_view name, float value, bool in_range, std::string_view expected) {
    require(std::isfinite(value) && in_range, "sampling: ", name, " is ", value, ", expected ", expected);
  };
  number("temperature", options.temperature, options.temperature >= 0.0f, "a number >= 0");
  require(options.top_k >= 0, "sampling: top_k is ", options.top_k, ", expected 0 (off) or more");
  number("top_p", options.top_p, options.top_p > 0.0f && options.top_p <= 1.0f, "a number in (0, 1]");
  number("min_p", options.min_p, options.min_p >= 0.0f && options.min_p <= 1.0f, "a number in [0, 1]");
  number("repetition_penalty", options.repetition_penalty, options.repetition_penalty > 0.0f, "a number > 0");
  number("presence_penalty", options.presence_penalty, true, "a finite number");
  number("frequency_penalty", options.frequency_penalty, true, "a finite number");
  for (const auto& [id, bias] : options.logit_bias) {
    require(id >= 0 && id < vocab_size, "sampling: logit_bias names token ", id,
            ", outside [0, vocab_size = ", vocab_size, ")");
    require(bias < kInfinity, "sampling: logit_bias of token ", id, " is ", bias, ", expected a number or -inf");
  }
  require(options.num_logprobs >= -1 && options.num_logprobs <= vocab_size, "sampling: num_logprobs is ",
          options.num_logprobs, ", expected -1 (none) to vocab_size = ", vocab_size);
}

Result<Sampled, SampleFailure> sample(std::span<const float> logits, const SamplingOptions& options,
                                      std::span<const int32_t> prompt, std::span<const int32_t> output, uint64_t step) {
  const Row raw(logits);
  if (!raw.usable) {
    return SampleFailure::kNonFinite;
  }
  Sampled sampled;
  const auto choose = [&](const Row& row) {
    sampled.id = options.temperature == 0.0f ? row.argmax() : draw(row, options, step);
  };
  const std::vector<float> changed = adjusted(logits, options, prompt, output);
  if (changed.empty()) {
    choose(raw);
  } else {
    const Row row(changed);
    if (!row.usable) {  // every token banned, or a penalty that overflows
      return SampleFailure::kNonFinite;
    }
    choose(row);
  }
  if (options.num_logprobs >= 0) {
    add_logprobs(raw, options.num_logprobs, sampled);
  }
  return sampled;
}

}  // namespace shoal
