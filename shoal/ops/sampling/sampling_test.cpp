// Sampling: cases worked by hand, properties, candidate sets by brute force, all with fixed seeds.
#include "shoal/ops/sampling/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "shoal/cpu/isa.h"
#include "shoal/ops/sampling/philox.h"
#include "testkit/guarded_tensor.h"

namespace shoal {

SHOAL_DECLARE_FOR_EACH_ISA(bool sampling_block_maxima(const float* logits, int64_t count, float* maxima);
                           void sampling_weights(const float* logits, int64_t count, float most,
                                                 double inverse_temperature, double* weights))

namespace {

Sampled sampled(std::span<const float> logits, const SamplingOptions& options, uint64_t step = 0,
                std::span<const int32_t> prompt = {}, std::span<const int32_t> output = {}) {
  const auto result = sample(logits, options, prompt, output, step);
  EXPECT_TRUE(result.ok());
  return result.ok() ? result.value() : Sampled{.id = -1};
}

// The ids in descending order of logits, ties by id, with their probabilities at a temperature: sorted, in f64.
struct Sorted {
  std::vector<int32_t> ids;
  std::vector<double> probabilities;
};
Sorted sorted(const std::vector<float>& logits, double temperature) {
  Sorted result;
  result.ids.resize(logits.size());
  std::iota(result.ids.begin(), result.ids.end(), 0);
  std::stable_sort(result.ids.begin(), result.ids.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  for (const int32_t id : result.ids) {
    result.probabilities.push_back(std::exp((static_cast<double>(logits[id]) - logits[result.ids[0]]) / temperature));
  }
  return result;
}

// What is left after top-k, top-p and min-p, by their definitions.
Sorted filtered(const std::vector<float>& logits, const SamplingOptions& options) {
  Sorted s = sorted(logits, options.temperature);
  const auto keep = [&](size_t count) {
    s.ids.resize(count);
    s.probabilities.resize(count);
    const double mass = std::accumulate(s.probabilities.begin(), s.probabilities.end(), 0.0);
    for (double& probability : s.probabilities) {
      probability /= mass;
    }
  };
  keep(options.top_k > 0 ? std::min(s.ids.size(), static_cast<size_t>(options.top_k)) : s.ids.size());
  if (options.top_p < 1.0f) {
    size_t count = 0;
    for (double mass = 0.0; count < s.ids.size() && mass < static_cast<double>(options.top_p);) {
      mass += s.probabilities[count++];
    }
    keep(count);
  }
  size_t count = 0;
  while (count < s.ids.size() && s.probabilities[count] >= options.min_p * s.probabilities[0]) {
    ++count;
  }
  keep(count);
  return s;
}

TEST(Philox, KnownAnswers) {  // from the Random123 distribution
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  constexpr uint32_t kOnes = 0xffffffffu;
  EXPECT_EQ(philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (std::array<uint32_t, 4>{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
}

TEST(Sampling, GreedyTakesTheLargestAndTheLowerIdOfTies) {
  const SamplingOptions greedy{.temperature = 0.0f};
  EXPECT_EQ(sampled(std::vector<float>{1, 3, 2}, greedy).id, 1);
  EXPECT_EQ(sampled(std::vector<float>{1, 3, 2, 3}, greedy).id, 1);
  EXPECT_EQ(sampled(std::vector<float>{-1, -0.0f, 0.0f}, greedy).id, 1);
  EXPECT_EQ(sampled(std::vector<float>{-INFINITY, -5}, greedy).id, 1);
  std::vector<float> many(1000, -1.0f);
  for (const size_t at : {0u, 63u, 64u, 500u, 960u, 999u}) {
    std::vector<float> row = many;
    row[at] = row[999] = 2.0f;
    EXPECT_EQ(sampled(row, greedy).id, static_cast<int32_t>(at));
  }
}

TEST(Sampling, RowsThatAreNotFinite) {
  for (const size_t size : {1u, 70u, 200u}) {
    for (const size_t at : {size_t{0}, size - 1}) {
      for (const float bad : {NAN, -NAN, INFINITY}) {
        std::vector<float> logits(size, 1.0f);
        logits[at] = bad;
        const auto result = sample(logits, {}, {}, {}, 0);
        ASSERT_FALSE(result.ok()) << size << " " << at << " " << bad;
        EXPECT_EQ(result.reason(), SampleFailure::kNonFinite);
      }
    }
    EXPECT_FALSE(sample(std::vector<float>(size, -INFINITY), {.temperature = 0.0f}, {}, {}, 0).ok());
  }
  EXPECT_FALSE(sample({}, {}, {}, {}, 0).ok());
  // All tokens banned by their bias; a penalty that overflows.
  SamplingOptions ban;
  ban.logit_bias = {{0, -INFINITY}, {1, -INFINITY}};
  EXPECT_FALSE(sample(std::vector<float>{1, 2}, ban, {}, {}, 0).ok());
  const std::vector<int32_t> prompt = {0};
  EXPECT_FALSE(sample(std::vector<float>{1e30f, 2}, {.repetition_penalty = 1e-20f}, prompt, {}, 0).ok());
}

TEST(Sampling, DrawsByInverseDistribution) {
  // Probabilities 1/2, 1/4, 1/4 for ids 2, 0, 1: the draw must follow the uniform number exactly.
  const float log2 = std::log(2.0f);
  const std::vector<float> logits = {0, 0, log2};
  int counts[3] = {};
  for (uint64_t step = 0; step < 2000; ++step) {
    const double uniform = philox_uniform(99, step);
    const int32_t expected = uniform < 0.5 ? 2 : uniform < 0.75 ? 0 : 1;
    if (std::abs(uniform - 0.5) < 1e-6 || std::abs(uniform - 0.75) < 1e-6) {
      continue;  // ln 2 is rounded
    }
    SamplingOptions options;
    options.seed = 99;
    const int32_t id = sampled(logits, options, step).id;
    EXPECT_EQ(id, expected) << step;
    ++counts[id];
  }
  // Fixed seed, so no chance is involved; 5 deviations of the binomial distribution.
  EXPECT_NEAR(counts[2], 1000, 112);
  EXPECT_NEAR(counts[0], 500, 97);
  EXPECT_NEAR(counts[1], 500, 97);
}

TEST(Sampling, AgreesWithBruteForce) {
  testkit::Random random(17);
  size_t num_cases = 0;
  std::set<size_t> set_sizes;
  for (const size_t vocab_size : {1u, 2u, 7u, 64u, 65u, 300u, 1500u}) {
    for (int round = 0; round < 60; ++round) {
      std::vector<float> logits = random.normals(vocab_size, random.uniform(0.1f, 8.0f));
      if (round % 3 == 0) {
        for (float& logit : logits) logit = std::round(logit);  // many ties
      }
      if (round % 5 == 0) {
        for (size_t i = 1; i < vocab_size; i += 3) logits[i] = -INFINITY;
      }
      SamplingOptions options;
      options.temperature = random.uniform(0.2f, 3.0f);
      options.top_k = round % 2 == 0 ? 0 : static_cast<int>(random.integer(1, static_cast<int64_t>(vocab_size) + 3));
      options.top_p = round % 4 < 2 ? 1.0f : random.uniform(0.05f, 0.999f);
      options.min_p = round % 8 < 4 ? 0.0f : random.uniform(0.0f, 0.6f);
      options.seed = static_cast<uint64_t>(round);
      const Sorted expected = filtered(logits, options);
      set_sizes.insert(expected.ids.size());
      for (uint64_t step = 0; step < 20; ++step) {
        const double uniform = philox_uniform(options.seed, step);
        double mass = 0.0;
        size_t idx = 0;
        while (mass + expected.probabilities[idx] < uniform) {
          mass += expected.probabilities[idx++];
        }
        const double margin = std::min(uniform - mass, mass + expected.probabilities[idx] - uniform);
        if (margin < 1e-9) {
          continue;  // the sums are rounded in another order
        }
        EXPECT_EQ(sampled(logits, options, step).id, expected.ids[idx])
            << "vocab " << vocab_size << " round " << round << " step " << step;
        ++num_cases;
      }
    }
  }
  EXPECT_GT(num_cases, 8000u);
  EXPECT_GT(set_sizes.size(), 50u);
}

TEST(Sampling, EveryCandidateOfASmallSetIsDrawnAndNoOther) {
  const std::vector<float> logits = {0.0f, 1.0f, 2.0f, 1.5f, -1.0f, 1.0f};
  struct Known {
    SamplingOptions options;
    std::set<int32_t> ids;
  };
  SamplingOptions base;
  const auto with = [&](auto change) {
    SamplingOptions options = base;
    change(options);
    return options;
  };
  // Shares in descending order: 2: 0.388, 3: 0.235, 1 and 5: 0.143 each, 0: 0.053, 4: 0.019.
  for (const Known& known : {
           Known{base, {0, 1, 2, 3, 4, 5}},
           Known{with([](auto& o) { o.top_k = 3; }), {1, 2, 3}},  // of the tie, the lower id
           Known{with([](auto& o) { o.top_k = 1; }), {2}},
           Known{with([](auto& o) { o.top_p = 0.38f; }), {2}},
           Known{with([](auto& o) { o.top_p = 0.40f; }), {2, 3}},
           Known{with([](auto& o) { o.top_p = 0.75f; }), {1, 2, 3}},
           Known{with([](auto& o) { o.top_p = 0.80f; }), {1, 2, 3, 5}},
           Known{with([](auto& o) { o.top_p = 1e-6f; }), {2}},
           Known{with([](auto& o) { o.min_p = 0.5f; }), {2, 3}},
           Known{with([](auto& o) { o.min_p = 0.3f; }), {1, 2, 3, 5}},
           Known{with([](auto& o) { o.min_p = 1.0f; }), {2}},
           // Within the top 2 the shares are 0.62 and 0.38: top-p counts what top-k has left.
           Known{with([](auto& o) { o.top_k = 2, o.top_p = 0.62f; }), {2}},
           Known{with([](auto& o) { o.top_k = 2, o.top_p = 0.63f; }), {2, 3}},
           Known{with([](auto& o) {
                   o.logit_bias = {{2, -100.0f}, {3, -100.0f}};
                 }),
                 {0, 1, 4, 5}},
           Known{with([](auto& o) {
                   o.logit_bias = {{4, 3.0f}}, o.top_k = 2;
                 }),
                 {2, 4}},
       }) {
    std::set<int32_t> drawn;
    for (uint64_t step = 0; step < 400; ++step) {
      drawn.insert(sampled(logits, known.options, step).id);
    }
    EXPECT_EQ(drawn, known.ids);
  }
}

TEST(Sampling, MinPOfOneKeepsAllMaxima) {
  const std::vector<float> logits = {3, 1, 3, 2.999f, 3};
  SamplingOptions options{.temperature = 5.0f, .min_p = 1.0f};
  std::set<int32_t> drawn;
  for (uint64_t step = 0; step < 100; ++step) {
    drawn.insert(sampled(logits, options, step).id);
  }
  EXPECT_EQ(drawn, (std::set<int32_t>{0, 2, 4}));
}

TEST(Sampling, TopKOfOneIsGreedyAtAnyTemperature) {
  testkit::Random random(4);
  for (int round = 0; round < 50; ++round) {
    auto logits = random.normals(777, 3.0f);
    if (round % 2 == 0) {
      for (float& logit : logits) logit = std::round(logit);
    }
    const int32_t greedy = sampled(logits, {.temperature = 0.0f}).id;
    for (const float temperature : {1e-30f, 0.1f, 1.0f, 50.0f, 1e30f}) {
      EXPECT_EQ(sampled(logits, {.temperature = temperature, .top_k = 1}, static_cast<uint64_t>(round)).id, greedy);
    }
    if (round % 2 == 1) {  // no ties: a temperature near 0 leaves only the largest
      EXPECT_EQ(sampled(logits, {.temperature = 1e-30f}).id, greedy);
    }
  }
}

TEST(Sampling, DependsOnSeedAndStepOnly) {
  testkit::Random random(4);
  const auto logits = random.normals(5000);
  std::set<int32_t> by_step, by_seed;
  for (uint64_t i = 0; i < 50; ++i) {
    SamplingOptions options;
    options.seed = 7;
    const int32_t id = sampled(logits, options, i).id;
    EXPECT_EQ(sampled(logits, options, i).id, id);
    by_step.insert(id);
    options.seed = i + 100;
    by_seed.insert(sampled(logits, options, 3).id);
  }
  EXPECT_GT(by_step.size(), 40u);
  EXPECT_GT(by_seed.size(), 40u);
}

TEST(Sampling, Penalties) {
  const SamplingOptions greedy{.temperature = 0.0f};
  const std::vector<int32_t> prompt = {0, 0, 3};
  const std::vector<int32_t> output = {1, 1, 1};
  const auto id = [&](const std::vector<float>& logits, auto change) {
    SamplingOptions options = greedy;
    change(options);
    return sampled(logits, options, 0, prompt, output).id;
  };
  // Repetition: positive logits are divided, others multiplied, once for each token of prompt and output.
  EXPECT_EQ(id({4, 1, 2.1f, 0}, [](auto& o) { o.repetition_penalty = 2.0f; }), 2);  // 4 / 2 once: 2
  EXPECT_EQ(id({4, 1, 1.9f, 0}, [](auto& o) { o.repetition_penalty = 2.0f; }), 0);
  EXPECT_EQ(id({-9, 4, 1.9f, 0}, [](auto& o) { o.repetition_penalty = 2.0f; }), 1);
  EXPECT_EQ(id({-2, -2, -3.9f, -5}, [](auto& o) { o.repetition_penalty = 2.0f; }), 2);  // -4, -4, -3.9, -10
  // Presence: once; frequency: three times; both of output tokens alone.
  EXPECT_EQ(id({5, 5.5f, 4, 4}, [](auto& o) { o.presence_penalty = 0.4f; }), 1);
  EXPECT_EQ(id({5, 5.5f, 4, 4}, [](auto& o) { o.presence_penalty = 0.6f; }), 0);
  EXPECT_EQ(id({5, 5.5f, 4, 4}, [](auto& o) { o.frequency_penalty = 0.16f; }), 1);
  EXPECT_EQ(id({5, 5.5f, 4, 4}, [](auto& o) { o.frequency_penalty = 0.17f; }), 0);
  EXPECT_EQ(id({5, 4.9f, 4, 4}, [](auto& o) { o.presence_penalty = -0.2f; }), 1);
  // Bias comes first: 1 + 3 = 4, halved: 2.
  EXPECT_EQ(id({1, 0, 2.1f, 0}, [](auto& o) { o.logit_bias = {{0, 3.0f}}, o.repetition_penalty = 2.0f; }), 2);
  EXPECT_EQ(id({1, 0, 1.9f, 0}, [](auto& o) { o.logit_bias = {{0, 3.0f}}, o.repetition_penalty = 2.0f; }), 0);
  // Tokens of another vocabulary.
  const std::vector<int32_t> far = {4};
  const std::vector<float> logits = {0, 1, 2, 3};
  EXPECT_EQ(testkit::error_of([&] { (void)sample(logits, {.repetition_penalty = 2.0f}, far, {}, 0); }),
            "sample: prompt holds token 4, outside [0, vocab_size = 4)");
  EXPECT_EQ(testkit::error_of([&] { (void)sample(logits, {.presence_penalty = 2.0f}, {}, far, 0); }),
            "sample: output holds token 4, outside [0, vocab_size = 4)");
  SamplingOptions bias;
  bias.logit_bias = {{-1, 1.0f}};
  EXPECT_EQ(testkit::error_of([&] { (void)sample(logits, bias, {}, {}, 0); }),
            "sample: logit_bias holds token -1, outside [0, vocab_size = 4)");
}

TEST(Sampling, LogProbabilitiesAreOfTheRawLogits) {
  // exp of the logits: 1, 2, 4, 4, 5 of 16.
  std::vector<float> logits;
  for (const double share : {1.0, 2.0, 4.0, 4.0, 5.0}) {
    logits.push_back(static_cast<float>(std::log(share)) + 20.0f);
  }
  SamplingOptions options{.temperature = 0.0f, .num_logprobs = 3};
  options.logit_bias = {{1, 100.0f}};
  const Sampled result = sampled(logits, options);
  EXPECT_EQ(result.id, 1);
  EXPECT_NEAR(result.logprob, std::log(2.0 / 16.0), 1e-6);
  ASSERT_EQ(result.top.size(), 3u);
  EXPECT_EQ(result.top[0].id, 4);
  EXPECT_EQ(result.top[1].id, 2);
  EXPECT_EQ(result.top[2].id, 3);
  EXPECT_NEAR(result.top[0].logprob, std::log(5.0 / 16.0), 1e-6);
  EXPECT_NEAR(result.top[2].logprob, std::log(4.0 / 16.0), 1e-6);
  EXPECT_TRUE(sampled(logits, {.temperature = 0.0f, .num_logprobs = 0}).top.empty());
  EXPECT_NEAR(sampled(logits, {.temperature = 0.0f, .num_logprobs = 0}).logprob, std::log(5.0 / 16.0), 1e-6);

  testkit::Random random(8);
  const auto many = random.normals(3000, 4.0f);
  const Sorted order = sorted(many, 1.0);
  const double log_mass =
      many[order.ids[0]] + std::log(std::accumulate(order.probabilities.begin(), order.probabilities.end(), 0.0));
  for (const int count : {1, 5, 46, 47, 48, 1000, 3000}) {  // 47 blocks
    const Sampled top = sampled(many, {.num_logprobs = count});
    EXPECT_NEAR(top.logprob, many[top.id] - log_mass, 1e-5);
    ASSERT_EQ(top.top.size(), static_cast<size_t>(count));
    for (size_t i = 0; i < top.top.size(); ++i) {
      EXPECT_EQ(top.top[i].id, order.ids[i]);
      EXPECT_FLOAT_EQ(top.top[i].logprob, static_cast<float>(many[order.ids[i]] - log_mass));
    }
  }
}

TEST(Sampling, EveryInstructionSetGivesTheSameBits) {
  testkit::Random random(3);
  auto logits = random.normals(1003, 200.0f);
  logits[17] = -INFINITY;
  const float most = *std::max_element(logits.begin(), logits.end());
  for (const cpu::Isa isa : cpu::available_isas()) {
    SCOPED_TRACE(cpu::to_string(isa));
    testkit::Guarded<float> maxima(16);
    EXPECT_TRUE(SHOAL_PICK_ISA(isa, sampling_block_maxima)(logits.data(), 1003, maxima.data()));
    for (size_t block = 0; block < 16; ++block) {
      EXPECT_EQ(
          maxima.data()[block],
          *std::max_element(logits.begin() + static_cast<std::ptrdiff_t>(block * 64),
                            logits.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(1003, block * 64 + 64))));
    }
    for (const double inverse_temperature : {0.01, 1.0, 30.0}) {
      testkit::Guarded<double> weights(logits.size());
      std::vector<double> scalar(logits.size());
      SHOAL_PICK_ISA(isa, sampling_weights)(logits.data(), 1003, most, inverse_temperature, weights.data());
      SHOAL_PICK_ISA(cpu::Isa::kScalar, sampling_weights)
      (logits.data(), 1003, most, inverse_temperature, scalar.data());
      for (size_t i = 0; i < logits.size(); ++i) {
        EXPECT_EQ(weights.data()[i], scalar[i]);
        const double exact = std::exp((static_cast<double>(logits[i]) - most) * inverse_temperature);
        EXPECT_NEAR(weights.data()[i], exact, 0x1p-51 * exact + 1e-300);
      }
      EXPECT_TRUE(weights.guards_intact());
    }
    EXPECT_TRUE(maxima.guards_intact());
  }
}

TEST(Sampling, OptionsOutOfRange) {
  const auto error = [](auto change) {
    SamplingOptions options;
    change(options);
    return testkit::error_of([&] { check_sampling_options(options, 100); });
  };
  EXPECT_EQ(error([](auto&) {}), "");
  EXPECT_EQ(error([](auto& o) { o.temperature = 0, o.top_k = 1000, o.min_p = 1, o.num_logprobs = 100; }), "");
  EXPECT_EQ(error([](auto& o) { o.temperature = -1; }), "sampling: temperature is -1, expected a number >= 0");
  EXPECT_EQ(error([](auto& o) { o.temperature = NAN; }), "sampling: temperature is nan, expected a number >= 0");
  EXPECT_EQ(error([](auto& o) { o.top_k = -1; }), "sampling: top_k is -1, expected 0 (off) or more");
  EXPECT_EQ(error([](auto& o) { o.top_p = 0; }), "sampling: top_p is 0, expected a number in (0, 1]");
  EXPECT_EQ(error([](auto& o) { o.top_p = 1.5f; }), "sampling: top_p is 1.5, expected a number in (0, 1]");
  EXPECT_EQ(error([](auto& o) { o.min_p = -0.5f; }), "sampling: min_p is -0.5, expected a number in [0, 1]");
  EXPECT_EQ(error([](auto& o) { o.min_p = 2; }), "sampling: min_p is 2, expected a number in [0, 1]");
  EXPECT_EQ(error([](auto& o) { o.repetition_penalty = 0; }),
            "sampling: repetition_penalty is 0, expected a number > 0");
  EXPECT_EQ(error([](auto& o) { o.presence_penalty = INFINITY; }),
            "sampling: presence_penalty is inf, expected a finite number");
  EXPECT_EQ(error([](auto& o) { o.frequency_penalty = NAN; }),
            "sampling: frequency_penalty is nan, expected a finite number");
  EXPECT_EQ(error([](auto& o) {
              o.logit_bias = {{3, 1.0f}, {100, 1.0f}};
            }),
            "sampling: logit_bias names token 100, outside [0, vocab_size = 100)");
  EXPECT_EQ(error([](auto& o) {
              o.logit_bias = {{3, INFINITY}};
            }),
            "sampling: logit_bias of token 3 is inf, expected a number or -inf");
  EXPECT_EQ(error([](auto& o) { o.num_logprobs = -2; }),
            "sampling: num_logprobs is -2, expected -1 (none) to vocab_size = 100");
  EXPECT_EQ(error([](auto& o) { o.num_logprobs = 101; }),
            "sampling: num_logprobs is 101, expected -1 (none) to vocab_size = 100");
}

}  // namespace
}  // namespace shoal
