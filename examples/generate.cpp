// Continues token ids with the most likely tokens.   generate MODEL ID [ID ...]
//
// Text is the tokenizer's business, which lives in the Python package: the engine takes and gives ids.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "shoal/shoal.h"

int main(int argc, char** argv) try {
  if (argc < 3) {
    std::fprintf(stderr, "usage: generate MODEL ID [ID ...]\n");
    return 2;
  }
  shoal::Engine engine({.model = argv[1]});
  shoal::Request request;
  for (int i = 2; i < argc; ++i) {
    request.prompt.push_back(std::atoi(argv[i]));
  }
  request.sampling.temperature = 0;
  request.max_tokens = 16;

  const auto id = engine.submit(std::move(request));
  if (!id) {
    std::fprintf(stderr, "the prompt is longer than the context\n");
    return 1;
  }
  for (;;) {
    const shoal::RequestUpdate update = engine.wait(id.value(), std::chrono::seconds(1));
    for (const shoal::Sampled& token : update.tokens) {
      std::printf("%d ", token.id);
    }
    if (update.finish != shoal::FinishReason::kNone) {
      std::printf("\n");
      std::fprintf(stderr, "%s", update.error.c_str());  // empty, or why it ended early
      return update.error.empty() ? 0 : 1;
    }
  }
} catch (const shoal::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
