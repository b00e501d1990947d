// Time of a token for a vocabulary of 262,144, by kind of sampling and shape of the distribution.
#include "shoal/ops/sampling/sampling.h"

#include <cstdio>
#include <vector>

#include "shoal/cpu/isa.h"
#include "testkit/testkit.h"

int main() {
  using namespace shoal;
  constexpr size_t kVocabSize = 262144;
  std::printf("%s, vocabulary of %zu\n", cpu::processor_name().c_str(), kVocabSize);
  struct Kind {
    const char* name;
    SamplingOptions options;
  };
  std::vector<Kind> kinds(9);
  kinds[0] = {"greedy", {.temperature = 0.0f}};
  kinds[1] = {"greedy, 5 log-probabilities", {.temperature = 0.0f, .num_logprobs = 5}};
  kinds[2] = {"greedy, penalties", {.temperature = 0.0f, .repetition_penalty = 1.1f, .frequency_penalty = 0.1f}};
  kinds[3] = {"temperature 1", {}};
  kinds[4] = {"top-k 50", {.top_k = 50}};
  kinds[5] = {"top-p 0.95", {.top_p = 0.95f}};
  kinds[6] = {"min-p 0.05", {.min_p = 0.05f}};
  kinds[7] = {"top-k 50, top-p 0.95, temperature 0.7", {.temperature = 0.7f, .top_k = 50, .top_p = 0.95f}};
  kinds[8] = {"top-k 20000, top-p 0.95", {.top_k = 20000, .top_p = 0.95f}};
  const std::vector<int32_t> tokens(2000, 17);
  for (const float deviation : {2.0f, 4.0f, 1.0f}) {
    testkit::Random random(1);
    std::vector<float> logits = random.normals(kVocabSize, deviation);
    // With deviation 2 as language models have it: a few dozen tokens stand out. The others are flat: the worst case.
    for (int i = 0; deviation == 2.0f && i < 40; ++i) {
      logits[static_cast<size_t>(random.integer(0, kVocabSize - 1))] = random.uniform(12.0f, 20.0f);
    }
    for (const Kind& kind : kinds) {
      uint64_t step = 0;
      int64_t sum = 0;
      const double seconds =
          testkit::median_seconds(21, [&] { sum += sample(logits, kind.options, tokens, tokens, step++).value().id; });
      std::printf("deviation %-4.1f %-40s %8.1f us  (%lld)\n", static_cast<double>(deviation), kind.name, seconds * 1e6,
                  static_cast<long long>(sum));
    }
  }
}
