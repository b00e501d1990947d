// The engine on CUDA: the tiny models of tests/golden against the CPU's exact mode, and requests that must not disturb
// each other.
#include "shoal/engine/device_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "shoal/engine/engine.h"
#include "testkit/on_device.h"
#include "testkit/testkit.h"

namespace shoal {
namespace {

using namespace std::chrono_literals;

EngineOptions options_of(const std::string& model, const std::string& device) {
  EngineOptions options;
  options.model = std::string(SHOAL_TEST_DATA) + "/models/" + model;
  options.device = device;
  options.exact = device == "cpu";
  options.max_context = 256;
  options.max_batch_tokens = 64;
  options.max_seqs = 8;
  options.page_size = 16;
  options.num_pages = 96;
  options.threads = 2;
  return options;
}

std::vector<int32_t> random_prompt(int64_t length, int64_t vocab_size, testkit::Random& random) {
  std::vector<int32_t> prompt(static_cast<size_t>(length));
  for (int32_t& token : prompt) {
    token = static_cast<int32_t>(random.integer(0, vocab_size - 1));
  }
  return prompt;
}

std::vector<int32_t> finish(Engine& engine, RequestId id) {
  std::vector<int32_t> tokens;
  for (;;) {
    const RequestUpdate update = engine.wait(id, 60s);
    for (const Sampled& token : update.tokens) {
      tokens.push_back(token.id);
    }
    if (update.finish != FinishReason::kNone) {
      EXPECT_EQ(update.finish, FinishReason::kLength) << update.error;
      return tokens;
    }
  }
}

Request greedy(std::vector<int32_t> prompt, int64_t max_tokens) {
  Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling.temperature = 0.0f;
  return request;
}

class DeviceFamilies : public testing::TestWithParam<std::string> {};

TEST_P(DeviceFamilies, LogitsOfTheCpu) {
  SHOAL_NEEDS_DEVICE();
  Engine exact(options_of(GetParam(), "cpu"));
  Engine engine(options_of(GetParam(), "cuda"));
  EXPECT_EQ(engine.info().device, "cuda:0");
  testkit::Random random(1);
  const int64_t vocab_size = engine.info().vocab_size;
  std::vector<double> distances;  // relative, of each row
  for (const int64_t length : {1, 5, 40, 150}) {
    const std::vector<int32_t> prompt = random_prompt(length, vocab_size, random);
    const std::vector<float> want = exact.logits(prompt);
    const std::vector<float> got = engine.logits(prompt);
    for (int64_t row = 0; row < length; ++row) {
      double difference = 0.0;
      double norm = 0.0;
      for (size_t i = static_cast<size_t>(row * vocab_size); i < static_cast<size_t>((row + 1) * vocab_size); ++i) {
        difference += std::pow(static_cast<double>(got[i]) - want[i], 2);
        norm += std::pow(static_cast<double>(want[i]), 2);
      }
      distances.push_back(std::sqrt(difference / norm));
    }
  }
  std::ranges::sort(distances);
  // bf16 activations through all layers. In a mixture they may turn a close choice of experts, which changes a row
  // altogether, and those that attend to it a little: some rows, not most.
  EXPECT_LT(distances[distances.size() / 2], 0.03);
  EXPECT_LT(distances[distances.size() * 3 / 4], 0.1);
  EXPECT_TRUE(std::isfinite(distances.back()));
}

TEST_P(DeviceFamilies, BatchesAndGraphsChangeNothing) {
  SHOAL_NEEDS_DEVICE();
  Engine engine(options_of(GetParam(), "cuda"));
  testkit::Random random(2);
  const int64_t vocab_size = engine.info().vocab_size;
  std::vector<std::vector<int32_t>> prompts;
  for (int i = 0; i < 6; ++i) {
    prompts.push_back(random_prompt(random.integer(1, 90), vocab_size, random));
  }
  // Twice the same: the second time from a prefix hit, its decoding steps from graphs.
  const auto run = [&] {
    std::vector<RequestId> ids;
    for (const std::vector<int32_t>& prompt : prompts) {
      ids.push_back(engine.submit(greedy(prompt, 12)).value());
    }
    std::vector<std::vector<int32_t>> tokens;
    for (const RequestId id : ids) {
      tokens.push_back(finish(engine, id));
    }
    return tokens;
  };
  const auto first = run();
  const auto second = run();
  int same = 0;
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].size(), 12u);
    same += first[i] == second[i] ? 1 : 0;
  }
  // Other chunks of the prompt round differently, which may decide a close race between two tokens; not many.
  EXPECT_GE(same, 4);
  EXPECT_EQ(engine.stats().num_running, 0);
}

// The same steps twice, one request at a time and no prefix to find: first as launches, then as graphs whose lengths and
// pages have changed since they were recorded. Bits must not differ, so neither may tokens or their probabilities.
TEST_P(DeviceFamilies, GraphsAreTheLaunches) {
  SHOAL_NEEDS_DEVICE();
  EngineOptions options = options_of(GetParam(), "cuda");
  options.prefix_cache = false;
  Engine engine(options);
  testkit::Random random(3);
  std::vector<std::vector<int32_t>> prompts;
  for (const int64_t length : {3, 60, 17, 120}) {
    prompts.push_back(random_prompt(length, engine.info().vocab_size, random));
  }
  const auto run = [&](const std::vector<int32_t>& prompt) {
    Request request = greedy(prompt, 20);
    request.sampling.num_logprobs = 3;
    const RequestId id = engine.submit(std::move(request)).value();
    std::vector<std::pair<int32_t, float>> drawn;
    FinishReason finish = FinishReason::kNone;
    while (finish == FinishReason::kNone) {
      const RequestUpdate update = engine.wait(id, 60s);
      for (const Sampled& token : update.tokens) {
        drawn.emplace_back(token.id, token.logprob);
      }
      finish = update.finish;
    }
    EXPECT_EQ(finish, FinishReason::kLength);
    return drawn;
  };
  std::vector<std::vector<std::pair<int32_t, float>>> first;
  for (const std::vector<int32_t>& prompt : prompts) {
    first.push_back(run(prompt));
  }
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(run(prompts[i]), first[i]) << "prompt " << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, DeviceFamilies,
                         testing::Values("llama", "llama_bias", "mistral", "qwen2", "qwen3", "gemma3", "qwen3_moe",
                                         "mixtral", "gpt_oss", "olmoe", "minimax_m2", "granite", "granitemoe"),
                         [](const auto& test) { return test.param; });

TEST(DeviceRefusals, WhatHasNoPathYet) {
  SHOAL_NEEDS_DEVICE();
  for (const char* model : {"deepseek_v3", "glm4_moe", "lfm2", "qwen3_next"}) {
    try {
      Engine engine(options_of(model, "cuda"));
      ADD_FAILURE() << model << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
      EXPECT_NE(std::string(error.what()).find("CUDA"), std::string::npos) << error.what();
    }
    EngineOptions anywhere = options_of(model, "auto");
    anywhere.exact = false;
    EXPECT_EQ(Engine(anywhere).info().device, "cpu") << model;
  }
}

}  // namespace
}  // namespace shoal
