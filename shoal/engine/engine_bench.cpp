// Time to first token and decode rate of an engine by context length, on random tokens: JSON, a line each.
//
//   engine_bench MODEL [--device cuda] [--context 8192,32768] [--tokens 64] [--runs 3] [--batch-tokens 2048]
//
// MODEL: a file, a folder, or synthetic:NAME (model/synthetic.h). Medians over the runs; the step with the most tokens is
// warmed up first.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "shoal/engine/engine.h"
#include "testkit/testkit.h"

namespace shoal {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

struct Timing {
  double first = 0.0;  // to the first token
  double step = 0.0;   // between tokens
};

Timing measure(Engine& engine, int64_t context, int64_t num_tokens, uint64_t seed) {
  testkit::Random random(seed);
  Request request;
  for (int64_t i = 0; i < context; ++i) {
    request.prompt.push_back(static_cast<int32_t>(random.integer(0, engine.info().vocab_size - 1)));
  }
  request.max_tokens = num_tokens;
  request.sampling.temperature = 0.0f;
  const auto start = Clock::now();
  const RequestId id = engine.submit(std::move(request)).value();
  Timing timing;
  size_t count = 0;
  for (;;) {
    const RequestUpdate update = engine.wait(id, std::chrono::hours(1));
    if (count == 0 && !update.tokens.empty()) {
      timing.first = seconds_since(start);
    }
    count += update.tokens.size();
    if (update.finish != FinishReason::kNone) {
      if (update.finish != FinishReason::kLength) {
        std::fprintf(stderr, "engine_bench: %s\n", update.error.c_str());
        std::exit(1);
      }
      timing.step = (seconds_since(start) - timing.first) / static_cast<double>(std::max<size_t>(count, 2) - 1);
      return timing;
    }
  }
}

std::vector<int64_t> numbers(const std::string& text) {
  std::vector<int64_t> result;
  for (size_t at = 0; at < text.size();) {
    size_t length = 0;
    result.push_back(std::stoll(text.substr(at), &length));
    at += length + 1;
  }
  return result;
}

int run(int argc, char** argv) {
  EngineOptions options;
  options.model = argv[1];
  options.prefix_cache = false;
  options.max_seqs = 8;
  std::vector<int64_t> contexts = {8192};
  int64_t num_tokens = 64;
  int64_t runs = 3;
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    const std::string value = argv[i + 1];
    if (name == "--device") {
      options.device = value;
    } else if (name == "--context") {
      contexts = numbers(value);
    } else if (name == "--tokens") {
      num_tokens = std::stoll(value);
    } else if (name == "--runs") {
      runs = std::stoll(value);
    } else if (name == "--batch-tokens") {
      options.max_batch_tokens = std::stoll(value);
    } else {
      std::fprintf(stderr, "engine_bench: unknown option %s\n", name.c_str());
      return 2;
    }
  }
  options.max_context = std::ranges::max(contexts) + num_tokens + 1;
  const auto start = Clock::now();
  Engine engine(options);
  const EngineInfo& info = engine.info();
  std::printf(
      "{\"model\": \"%s\", \"device\": \"%s\", \"kv_dtype\": \"%s\", \"weight_bytes\": %lld, \"kv_bytes\": %lld, "
      "\"load_s\": %.1f, \"max_batch_tokens\": %lld}\n",
      argv[1], info.device.c_str(), info.kv_dtype.c_str(), static_cast<long long>(info.weight_bytes),
      static_cast<long long>(info.kv_bytes), seconds_since(start), static_cast<long long>(options.max_batch_tokens));
  std::fflush(stdout);
  for (const int64_t context : contexts) {
    measure(engine, context, 4, 99);
    std::vector<double> first;
    std::vector<double> step;
    for (int64_t i = 0; i < runs; ++i) {
      const Timing timing = measure(engine, context, num_tokens, static_cast<uint64_t>(i));
      first.push_back(timing.first);
      step.push_back(timing.step);
    }
    const double ttft = median(first);
    const double each = median(step);
    std::printf(
        "{\"context\": %lld, \"ttft_s\": %.4f, \"prefill_tok_s\": %.0f, \"decode_tok_s\": %.1f, "
        "\"step_ms\": %.3f, \"runs\": %lld}\n",
        static_cast<long long>(context), ttft, static_cast<double>(context) / ttft, 1.0 / each, 1e3 * each,
        static_cast<long long>(runs));
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace shoal

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: engine_bench MODEL [--device D] [--context N,...] [--tokens N] [--runs N]\n");
    return 2;
  }
  try {
    return shoal::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "engine_bench: %s\n", error.what());
    return 1;
  }
}
