#include "shoal/engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <thread>

#include "shoal/base/text.h"
#include "shoal/engine/fake_model.h"
#include "shoal/engine/kv_calibration.h"
#include "shoal/engine/resolve.h"
#include "testkit/testkit.h"

namespace shoal {
namespace {

using namespace std::chrono_literals;
using testkit::FakeControl;
using testkit::FakeHash;
using testkit::FakeModel;
using testkit::kFakeVocab;

template <class Body>
std::string message_of(ErrorCode code, Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), to_string(code));
    return error.what();
  }
  return "no error";
}

EngineOptions small(int64_t num_pages = 64) {
  EngineOptions options;
  options.kv_dtype = "f32";
  options.max_context = 512;
  options.page_size = 16;
  options.num_pages = num_pages;
  options.max_batch_tokens = 64;
  options.max_seqs = 8;
  options.threads = 2;
  return options;
}

// The engine and the strings its model hangs on. The gate opens before the engine is destroyed.
struct Fixture {
  explicit Fixture(const EngineOptions& options = small(), bool has_states = false)
      : control(std::make_shared<FakeControl>()),
        engine(options, std::make_unique<FakeModel>(control, 4096, has_states)) {}
  ~Fixture() { control->open(); }

  std::shared_ptr<FakeControl> control;
  Engine engine;
};

std::vector<int32_t> prompt_of(int64_t length, uint64_t seed = 1) {
  testkit::Random random(seed);
  std::vector<int32_t> prompt(static_cast<size_t>(length));
  for (int32_t& token : prompt) {
    token = static_cast<int32_t>(random.integer(0, kFakeVocab - 4));
  }
  return prompt;
}

Request greedy(std::vector<int32_t> prompt, int64_t max_tokens) {
  Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling.temperature = 0.0f;
  return request;
}

struct Answer {
  std::vector<int32_t> tokens;
  RequestUpdate last;
};

// Fails instead of waiting for ever.
Answer finish(Engine& engine, RequestId id) {
  Answer answer;
  const auto deadline = std::chrono::steady_clock::now() + 60s;
  while (answer.last.finish == FinishReason::kNone) {
    if (std::chrono::steady_clock::now() > deadline) {
      ADD_FAILURE() << "request " << id << " hangs";
      std::abort();
    }
    answer.last = engine.wait(id, 1000ms);
    for (const Sampled& token : answer.last.tokens) {
      answer.tokens.push_back(token.id);
    }
  }
  return answer;
}

Answer run(Engine& engine, const Request& request) { return finish(engine, engine.submit(request).value()); }

// The same without an engine.
std::vector<int32_t> expected(const Request& request) {
  FakeHash hash;
  for (const int32_t token : request.prompt) {
    hash.add(token);
  }
  std::vector<int32_t> output;
  std::vector<float> logits(kFakeVocab);
  for (int64_t step = 0; step < request.max_tokens; ++step) {
    hash.write(logits);
    output.push_back(sample(logits, request.sampling, request.prompt, output, static_cast<uint64_t>(step)).value().id);
    hash.add(output.back());
    if (std::ranges::find(request.stop_ids, output.back()) != request.stop_ids.end()) {
      break;
    }
  }
  return output;
}

void expect_all_pages_back(const Engine& engine) {
  const EngineStats stats = engine.stats();
  EXPECT_EQ(stats.num_waiting, 0);
  EXPECT_EQ(stats.num_running, 0);
  EXPECT_EQ(stats.num_free_pages + stats.num_cached_pages, stats.num_pages);
}

TEST(Engine, GeneratesWhatTheModelSays) {
  Fixture f;
  const Request request = greedy(prompt_of(40), 30);
  const Answer answer = run(f.engine, request);
  EXPECT_EQ(answer.tokens, expected(request));
  EXPECT_EQ(answer.last.finish, FinishReason::kLength);
  EXPECT_EQ(answer.last.num_prompt_done, 40);
  EXPECT_EQ(answer.last.num_prefix_hit, 0);
  expect_all_pages_back(f.engine);
  EXPECT_EQ(f.engine.stats().num_tokens, 40 + 29);
  EXPECT_EQ(f.engine.stats().num_steps, 30);
}

TEST(Engine, SeededSamplingCountsItsSteps) {
  Fixture f;
  Request request = greedy(prompt_of(5), 20);
  request.sampling.temperature = 0.8f;
  request.sampling.seed = 42;
  EXPECT_EQ(run(f.engine, request).tokens, expected(request));
}

TEST(Engine, ChunksGiveTheTokensOfOneShot) {
  const Request request = greedy(prompt_of(301), 10);
  for (const int64_t budget : {1, 7, 16, 64, 1000}) {
    SCOPED_TRACE(budget);
    EngineOptions options = small();
    options.max_batch_tokens = budget;
    Fixture f(options);
    EXPECT_EQ(run(f.engine, request).tokens, expected(request));
    EXPECT_EQ(f.engine.stats().num_steps, (301 + budget - 1) / budget + 9);
  }
}

TEST(Engine, StopIdIsDeliveredAndEnds) {
  Fixture f;
  Request request = greedy(prompt_of(9), 30);
  const std::vector<int32_t> all = expected(request);
  request.stop_ids = {kFakeVocab + 1000, all[6]};
  const Answer answer = run(f.engine, request);
  EXPECT_EQ(answer.last.finish, FinishReason::kStop);
  EXPECT_EQ(answer.tokens, expected(request));
  EXPECT_EQ(answer.tokens.back(), all[6]);
}

TEST(Engine, MaxTokensZeroOnlyReadsThePrompt) {
  Fixture f;
  const Answer answer = run(f.engine, greedy(prompt_of(100), 0));
  EXPECT_TRUE(answer.tokens.empty());
  EXPECT_EQ(answer.last.finish, FinishReason::kLength);
  EXPECT_EQ(answer.last.num_prompt_done, 100);
}

TEST(Engine, FillsMaxContextToTheLastToken) {
  EngineOptions options = small(4);
  options.max_context = 65;
  Fixture f(options);
  const Request request = greedy(prompt_of(40), 25);  // the 65th token is drawn, not computed: four pages suffice
  EXPECT_EQ(run(f.engine, request).tokens, expected(request));
  EXPECT_EQ(f.engine.submit(greedy(prompt_of(40), 26)).reason(), SubmitFailure::kContextTooLong);
  EXPECT_EQ(f.engine.submit(greedy(prompt_of(66), 0)).reason(), SubmitFailure::kContextTooLong);
  EXPECT_EQ(f.engine.submit(greedy(prompt_of(1), INT64_MAX)).reason(), SubmitFailure::kContextTooLong);
}

TEST(Engine, RefusesWhatThePagesCanNeverHold) {
  Fixture f(small(4));
  EXPECT_TRUE(f.engine.submit(greedy(prompt_of(64), 1)).ok());
  EXPECT_EQ(f.engine.submit(greedy(prompt_of(64), 2)).reason(), SubmitFailure::kContextTooLong);
}

TEST(Engine, RejectsBadRequests) {
  Fixture f;
  const auto message = [&](const Request& request) {
    return message_of(ErrorCode::kInvalidArgument, [&] { static_cast<void>(f.engine.submit(request)); });
  };
  EXPECT_EQ(message(greedy({}, 1)), "the prompt is empty: at least one token is needed");
  EXPECT_EQ(message(greedy({1, 64}, 1)), "prompt token 1 is 64, outside the vocabulary of 64");
  EXPECT_EQ(message(greedy({-1}, 1)), "prompt token 0 is -1, outside the vocabulary of 64");
  EXPECT_EQ(message(greedy({1}, -1)), "max_tokens must not be negative, it is -1");
  Request request = greedy({1}, 1);
  request.sampling.temperature = -1.0f;
  EXPECT_NE(message(request).find("temperature"), std::string::npos);
  EXPECT_EQ(message_of(ErrorCode::kInvalidArgument, [&] { f.engine.wait(77, 0ms); }),
            "request 77 is unknown or has already delivered its end");
  const RequestId id = f.engine.submit(greedy({1}, 1)).value();
  finish(f.engine, id);
  EXPECT_EQ(message_of(ErrorCode::kInvalidArgument, [&] { f.engine.wait(id, 0ms); }),
            concat("request ", id, " is unknown or has already delivered its end"));
  f.engine.cancel(id);
  f.engine.cancel(12345);
}

TEST(Engine, DecodesGoFirstAndPromptsFillTheStep) {
  EngineOptions options = small();
  options.max_batch_tokens = 20;
  Fixture f(options);
  f.control->close();
  const RequestId a = f.engine.submit(greedy(prompt_of(10, 1), 4)).value();
  f.control->wait_until_held();  // the first step holds a alone
  const RequestId b = f.engine.submit(greedy(prompt_of(30, 2), 2)).value();
  const RequestId c = f.engine.submit(greedy(prompt_of(12, 3), 1)).value();
  f.control->open();
  for (const RequestId id : {a, b, c}) {
    finish(f.engine, id);
  }
  const auto steps = f.control->steps();
  ASSERT_EQ(steps.size(), 4u);
  EXPECT_EQ(steps[0].q_lens, (std::vector<int32_t>{10}));
  EXPECT_EQ(steps[1].q_lens, (std::vector<int32_t>{1, 19}));
  EXPECT_EQ(steps[2].q_lens, (std::vector<int32_t>{1, 11, 8}));
  EXPECT_EQ(steps[2].past_lens, (std::vector<int32_t>{11, 19, 0}));
  EXPECT_EQ(steps[3].q_lens, (std::vector<int32_t>{1, 1, 4}));
}

TEST(Engine, NeighboursDoNotChangeTokens) {
  Fixture f;
  std::vector<Request> requests;
  std::vector<RequestId> ids;
  for (uint64_t i = 0; i < 20; ++i) {
    requests.push_back(greedy(prompt_of(static_cast<int64_t>(3 + 11 * i % 90), i), static_cast<int64_t>(1 + i)));
    ids.push_back(f.engine.submit(requests.back()).value());
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(finish(f.engine, ids[i]).tokens, expected(requests[i])) << i;
  }
  expect_all_pages_back(f.engine);
}

TEST(Engine, PreemptionLosesNothing) {
  for (const auto& [prefix_cache, has_states] : {std::pair(false, false), {true, false}, {true, true}}) {
    SCOPED_TRACE(concat(prefix_cache, " ", has_states));
    EngineOptions options = small(8);
    options.prefix_cache = prefix_cache;
    Fixture f(options, has_states);
    f.control->close();
    std::vector<Request> requests;
    std::vector<RequestId> ids;
    for (uint64_t i = 0; i < 4; ++i) {
      requests.push_back(greedy(prompt_of(14, i), 80));
      requests.back().sampling.temperature = i % 2 == 0 ? 0.0f : 1.0f;
      requests.back().sampling.seed = i;
      ids.push_back(f.engine.submit(requests.back()).value());
    }
    f.control->open();
    for (size_t i = 0; i < ids.size(); ++i) {
      const Answer answer = finish(f.engine, ids[i]);
      EXPECT_EQ(answer.tokens, expected(requests[i])) << i;
      EXPECT_EQ(answer.last.num_prompt_done, 14);
    }
    EXPECT_GT(f.engine.stats().num_preemptions, 0);
    expect_all_pages_back(f.engine);
  }
}

TEST(Engine, WhoseTokensAreNotTakenPauses) {
  for (const bool has_states : {false, true}) {
    EngineOptions options = small();
    options.max_seqs = 2;
    Fixture f(options, has_states);
    Request request = greedy(prompt_of(20), 100);
    request.max_queued_tokens = 10;
    std::vector<RequestId> stalled;
    for (int i = 0; i < 3; ++i) {
      stalled.push_back(f.engine.submit(request).value());
    }
    while (f.engine.stats().num_paused < 3) {
      std::this_thread::yield();
    }
    const EngineStats paused = f.engine.stats();
    EXPECT_EQ(paused.num_running + paused.num_waiting, 0);
    // Others find all places free, and what stalled goes on where it was.
    const Request other = greedy(prompt_of(30, 2), 40);
    EXPECT_EQ(run(f.engine, other).tokens, expected(other));
    EXPECT_EQ(run(f.engine, other).tokens, expected(other));
    EXPECT_EQ(f.engine.stats().num_paused, 3);
    EXPECT_EQ(f.engine.wait(stalled[0], 1000ms).tokens.size(), 10u);
    f.engine.cancel(stalled[0]);
    EXPECT_EQ(finish(f.engine, stalled[0]).last.finish, FinishReason::kCancelled);
    f.engine.cancel(stalled[1]);
    EXPECT_EQ(finish(f.engine, stalled[1]).last.finish, FinishReason::kCancelled);
    EXPECT_EQ(finish(f.engine, stalled[2]).tokens, expected(request));
    expect_all_pages_back(f.engine);
    EXPECT_EQ(f.engine.stats().num_paused, 0);
  }
}

TEST(Engine, CancelsInQueueInPrefillAndInDecode) {
  EngineOptions options = small();
  options.max_seqs = 2;
  options.max_batch_tokens = 20;
  Fixture f(options);
  f.control->close();
  const RequestId decoding = f.engine.submit(greedy(prompt_of(4, 1), 100)).value();
  f.control->wait_until_held();
  const RequestId prefilling = f.engine.submit(greedy(prompt_of(200, 2), 10)).value();
  const RequestId queued = f.engine.submit(greedy(prompt_of(10, 3), 10)).value();
  f.control->pass(2);
  f.control->wait_until_held();
  EXPECT_EQ(f.engine.stats().num_running, 2);
  EXPECT_EQ(f.engine.stats().num_waiting, 1);
  for (const RequestId id : {decoding, prefilling, queued}) {
    f.engine.cancel(id);
  }
  f.control->open();
  const Answer first = finish(f.engine, decoding);
  EXPECT_EQ(first.last.finish, FinishReason::kCancelled);
  EXPECT_EQ(first.tokens.size(), 3u);  // what was drawn before the cancellation is delivered
  const Answer second = finish(f.engine, prefilling);
  EXPECT_EQ(second.last.finish, FinishReason::kCancelled);
  EXPECT_EQ(second.last.num_prompt_done, 38);
  EXPECT_EQ(finish(f.engine, queued).last.finish, FinishReason::kCancelled);
  EXPECT_EQ(f.control->steps().size(), 3u);  // within one step
  expect_all_pages_back(f.engine);
  const Request next = greedy(prompt_of(20, 4), 5);
  EXPECT_EQ(run(f.engine, next).tokens, expected(next));
}

TEST(Engine, PrefixHitsSkipWorkAndKeepTokens) {
  Fixture f;
  const Request request = greedy(prompt_of(64), 10);
  EXPECT_EQ(run(f.engine, request).last.num_prefix_hit, 0);
  const int64_t num_tokens = f.engine.stats().num_tokens;
  const Answer again = run(f.engine, request);
  EXPECT_EQ(again.last.num_prefix_hit, 48);  // the last page holds the token whose logits are wanted
  EXPECT_EQ(again.last.num_prompt_done, 64);
  EXPECT_EQ(again.tokens, expected(request));
  EXPECT_EQ(f.engine.stats().num_tokens - num_tokens, 16 + 9);

  // A conversation goes on: the answer's pages are found too.
  Request longer = request;
  const std::vector<int32_t> answer = expected(request);
  longer.prompt.insert(longer.prompt.end(), answer.begin(), answer.end());
  longer.prompt.resize(90, 5);
  EXPECT_EQ(run(f.engine, longer).tokens, expected(longer));
  Request extended = longer;
  extended.prompt.push_back(9);
  const Answer last = run(f.engine, extended);
  EXPECT_EQ(last.last.num_prefix_hit, 80);
  EXPECT_EQ(last.tokens, expected(extended));

  Request other = request;
  other.salt = 5;
  const Answer salted = run(f.engine, other);
  EXPECT_EQ(salted.last.num_prefix_hit, 0);
  EXPECT_EQ(salted.tokens, expected(request));
  expect_all_pages_back(f.engine);
}

// The fake model notices every state that is not the one at the end of the prefix.
TEST(Engine, WithStatesPrefixesAreFoundWhereTheyAreKept) {
  Fixture f(small(), true);
  const Request request = greedy(prompt_of(70), 30);
  EXPECT_EQ(run(f.engine, request).tokens, expected(request));
  const Answer again = run(f.engine, request);
  EXPECT_EQ(again.last.num_prefix_hit, 64);
  EXPECT_EQ(again.tokens, expected(request));

  // A conversation goes on: 70 + 30 tokens, of which the last was never computed.
  Request longer = request;
  const std::vector<int32_t> answer = expected(request);
  longer.prompt.insert(longer.prompt.end(), answer.begin(), answer.end());
  longer.prompt.resize(130, 5);
  const Answer continued = run(f.engine, longer);
  EXPECT_EQ(continued.last.num_prefix_hit, 96);
  EXPECT_EQ(continued.tokens, expected(longer));

  // Others part from it within the prompt: the second finds only pages, and keeps states there for the third.
  Request other = request;
  other.prompt.resize(40);
  other.prompt.resize(80, 7);
  const Answer second = run(f.engine, other);
  EXPECT_EQ(second.last.num_prefix_hit, 0);
  EXPECT_EQ(second.tokens, expected(other));
  other.prompt.back() = 8;
  other.prompt[45] = 8;
  const Answer third = run(f.engine, other);
  EXPECT_EQ(third.last.num_prefix_hit, 32);
  EXPECT_EQ(third.tokens, expected(other));
  expect_all_pages_back(f.engine);
}

TEST(Engine, WithoutPrefixCacheNothingIsFoundAgain) {
  EngineOptions options = small();
  options.prefix_cache = false;
  Fixture f(options);
  const Request request = greedy(prompt_of(64), 10);
  run(f.engine, request);
  const Answer again = run(f.engine, request);
  EXPECT_EQ(again.last.num_prefix_hit, 0);
  EXPECT_EQ(again.tokens, expected(request));
  EXPECT_EQ(f.engine.stats().num_free_pages, 64);
  EXPECT_EQ(f.engine.stats().num_cached_pages, 0);
}

class AnswersToOnePrompt : public testing::TestWithParam<bool> {};  // with states

TEST_P(AnswersToOnePrompt, ShareItsPages) {
  Fixture f(small(), GetParam());
  f.control->close();
  const RequestId warm = f.engine.submit(greedy({1}, 1)).value();
  f.control->wait_until_held();  // so that the others arrive together
  std::vector<Request> requests;
  std::vector<RequestId> ids;
  for (uint64_t i = 0; i < 5; ++i) {
    requests.push_back(greedy(prompt_of(50), 20));
    requests.back().sampling.temperature = 1.0f;
    requests.back().sampling.seed = i;
    ids.push_back(f.engine.submit(requests.back()).value());
  }
  f.control->open();
  finish(f.engine, warm);
  int64_t num_hit = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const Answer answer = finish(f.engine, ids[i]);
    EXPECT_EQ(answer.tokens, expected(requests[i])) << i;
    num_hit += answer.last.num_prefix_hit;
  }
  EXPECT_EQ(num_hit, 4 * 48);
  expect_all_pages_back(f.engine);
}

INSTANTIATE_TEST_SUITE_P(States, AnswersToOnePrompt, testing::Bool());

TEST(Engine, NonFiniteLogitsEndThatRequestOnly) {
  Fixture f;
  f.control->close();
  std::vector<int32_t> poisoned = prompt_of(40, 1);
  poisoned[33] = testkit::kNanToken;
  const Request good = greedy(prompt_of(20, 2), 20);
  const RequestId bad_id = f.engine.submit(greedy(poisoned, 5)).value();
  const RequestId good_id = f.engine.submit(good).value();
  f.control->open();
  const Answer bad = finish(f.engine, bad_id);
  EXPECT_EQ(bad.last.finish, FinishReason::kNonFinite);
  EXPECT_EQ(bad.last.error, "the logits at position 39 are not finite");
  EXPECT_TRUE(bad.tokens.empty());
  EXPECT_EQ(finish(f.engine, good_id).tokens, expected(good));
  expect_all_pages_back(f.engine);
  EXPECT_EQ(run(f.engine, greedy(poisoned, 5)).last.num_prefix_hit, 0);  // its pages are not kept
  EXPECT_EQ(message_of(ErrorCode::kModelFormat, [&] { f.engine.logits(poisoned); }),
            "the logits at position 33 are not finite");
}

TEST(Engine, AnExceptionEndsTheRequestsOfItsStepAndTheEngineGoesOn) {
  EngineOptions options = small();
  options.max_batch_tokens = 40;
  Fixture f(options);
  f.control->close();
  std::vector<int32_t> refused = prompt_of(30, 1);
  refused[7] = testkit::kThrowToken;
  const RequestId neighbour = f.engine.submit(greedy(prompt_of(10, 2), 20)).value();
  f.control->wait_until_held();
  const RequestId bad = f.engine.submit(greedy(refused, 5)).value();
  const Request later = greedy(prompt_of(60, 3), 20);
  f.control->open();
  for (const RequestId id : {neighbour, bad}) {
    const Answer answer = finish(f.engine, id);
    EXPECT_EQ(answer.last.finish, FinishReason::kError);
    EXPECT_EQ(answer.last.error, "the fake model refuses token 62");
  }
  EXPECT_EQ(run(f.engine, later).tokens, expected(later));
  expect_all_pages_back(f.engine);
  EXPECT_EQ(message_of(ErrorCode::kInternal, [&] { f.engine.logits(refused); }), "the fake model refuses token 62");
}

TEST(Engine, LogitsOfEveryRowAlsoInChunksAndAfterAPrefixHit) {
  Fixture f;
  const std::vector<int32_t> prompt = prompt_of(150);
  std::vector<float> expected_logits(prompt.size() * kFakeVocab);
  FakeHash hash;
  for (size_t i = 0; i < prompt.size(); ++i) {
    hash.add(prompt[i]);
    hash.write(std::span(expected_logits).subspan(i * kFakeVocab, kFakeVocab));
  }
  EXPECT_EQ(f.engine.logits(prompt), expected_logits);
  run(f.engine, greedy(prompt, 1));
  EXPECT_EQ(f.engine.logits(prompt), expected_logits);

  // With others around, several callers at once, and as a plain request.
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i) {
    callers.emplace_back([&] { EXPECT_EQ(f.engine.logits(prompt), expected_logits); });
  }
  Request request = greedy(prompt, 50);
  request.all_logits = true;
  const Request other = greedy(prompt_of(100, 9), 30);
  const RequestId id = f.engine.submit(request).value();
  EXPECT_EQ(run(f.engine, other).tokens, expected(other));
  const Answer answer = finish(f.engine, id);
  EXPECT_EQ(answer.last.finish, FinishReason::kLength);
  EXPECT_TRUE(answer.tokens.empty());
  for (std::thread& caller : callers) {
    caller.join();
  }
  EXPECT_EQ(message_of(ErrorCode::kInvalidArgument, [&] { f.engine.logits(prompt_of(513)); }),
            "logits of 513 tokens: more than max_context 512");
  EXPECT_EQ(message_of(ErrorCode::kInvalidArgument, [&] { Fixture(small(2)).engine.logits(prompt_of(33)); }),
            "logits of 33 tokens: more than the KV cache of 32 tokens holds");
  expect_all_pages_back(f.engine);
}

TEST(Engine, WaitTellsProgressAndTimesOut) {
  Fixture f;
  f.control->close();
  const RequestId id = f.engine.submit(greedy(prompt_of(100), 2)).value();
  EXPECT_EQ(f.engine.wait(id, 1ms).num_prompt_done, 0);
  f.control->pass(1);
  EXPECT_EQ(f.engine.wait(id, 60s).num_prompt_done, 64);
  EXPECT_EQ(f.engine.wait(id, 1ms).num_prompt_done, 64);
  f.control->pass(1);
  const RequestUpdate update = f.engine.wait(id, std::chrono::milliseconds::max());
  EXPECT_EQ(update.num_prompt_done, 100);
  EXPECT_EQ(update.tokens.size(), 1u);
  EXPECT_EQ(update.finish, FinishReason::kNone);
  f.control->open();
  EXPECT_EQ(finish(f.engine, id).tokens.size(), 1u);
}

TEST(Engine, DestructionCancelsAndWakesWhoWaits) {
  auto control = std::make_shared<FakeControl>();
  auto engine = std::make_unique<Engine>(small(), std::make_unique<FakeModel>(control));
  control->close();
  const RequestId running = engine->submit(greedy(prompt_of(5), 400)).value();
  control->wait_until_held();
  const RequestId queued = engine->submit(greedy(prompt_of(5), 400)).value();
  std::atomic<int> num_waiting = 0;
  std::vector<std::thread> waiters;
  for (const RequestId id : {running, queued}) {
    waiters.emplace_back([&num_waiting, id, &waited_on = *engine] {
      ++num_waiting;
      const RequestUpdate update = waited_on.wait(id, 60s);
      EXPECT_EQ(update.finish, FinishReason::kCancelled);
    });
  }
  while (num_waiting < 2) {
    std::this_thread::yield();
  }
  std::this_thread::sleep_for(50ms);  // both sleep in wait(); the step at the gate ends after the destructor began
  std::thread opener([&] {
    std::this_thread::sleep_for(50ms);
    control->pass(1);
  });
  engine.reset();
  opener.join();
  for (std::thread& waiter : waiters) {
    waiter.join();
  }
}

TEST(Engine, InfoSaysWhatWasResolved) {
  Fixture f;
  const EngineInfo& info = f.engine.info();
  EXPECT_EQ(info.architecture, "fake");
  EXPECT_EQ(info.device, "cpu");
  EXPECT_EQ(info.kv_dtype, "f32");
  EXPECT_EQ(info.threads, 2);
  EXPECT_EQ(info.vocab_size, kFakeVocab);
  EXPECT_EQ(info.max_context, 512);
  EXPECT_EQ(info.num_pages, 64);
  EXPECT_EQ(info.kv_bytes, 64 * 16 * 2 * 4);
  EXPECT_EQ(info.state_bytes, 0);
  EXPECT_TRUE(info.prefix_cache);
  const EngineOptions options = small();
  Fixture with_states(options, true);
  EXPECT_EQ(with_states.engine.info().state_bytes,
            (8 + 64) * 2 * 4);  // as many prefixes as the KV bytes hold, at most 64
  EXPECT_TRUE(with_states.engine.info().prefix_cache);
}

TEST(EngineOptions, AreResolved) {
  ModelInfo model;
  model.max_positions = 100000;
  model.kv_layers = {{2, 64, 64}, {2, 64, 64}};  // f16: 2 * 2 * 2 * 64 * 2 bytes a token
  const int64_t token_bytes = 1024;
  EngineOptions options;
  ResolvedOptions resolved = resolve_options(options, model, int64_t{1} << 40);
  EXPECT_EQ(resolved.kv_type, KvType::kF16);
  EXPECT_EQ(resolved.max_context, 8192);
  EXPECT_EQ(resolved.num_pages, 4 * 8192 / 32);
  EXPECT_EQ(resolve_options(options, model, 3 * 32 * token_bytes * 10).num_pages, 10);  // a third of what is free
  EXPECT_EQ(resolve_options(options, model, std::nullopt).num_pages, 4 * 8192 / 32);
  EXPECT_EQ(message_of(ErrorCode::kOutOfMemory, [&] { resolve_options(options, model, 3000); }),
            "a third of the free memory, 1.0 kB, does not hold one KV page of 32.8 kB");
  options.exact = true;
  EXPECT_EQ(resolve_options(options, model, {}).kv_type, KvType::kF32);
  options.kv_dtype = "bf16";
  EXPECT_EQ(resolve_options(options, model, {}).kv_type, KvType::kBF16);
  options.kv_bytes = 32 * token_bytes * 7 + 5;
  EXPECT_EQ(resolve_options(options, model, {}).num_pages, 7);
  options.num_pages = 3;
  EXPECT_EQ(resolve_options(options, model, {}).num_pages, 3);
  model.max_positions = 2048;
  EXPECT_EQ(resolve_options(options, model, {}).max_context, 2048);
  EXPECT_GT(available_memory_bytes().value_or(1), 0);
}

TEST(EngineOptions, AreRejectedByName) {
  ModelInfo model;
  model.max_positions = 4096;
  model.kv_layers = {{1, 64, 64}};
  const auto message = [&](auto&& change, ErrorCode code = ErrorCode::kInvalidArgument) {
    EngineOptions options;
    change(options);
    return message_of(code, [&] { resolve_options(options, model, {}); });
  };
  EXPECT_TRUE(
      message([](auto& o) { o.device = "cuda:999"; }, ErrorCode::kUnsupported).starts_with("device cuda:999: "));
  for (const char* device : {"tpu", "cuda:", "cuda:x", "cuda:-1", "cuda:1234"}) {
    EXPECT_EQ(message([&](auto& o) { o.device = device; }),
              concat("device must be auto, cpu, cuda or cuda:N, not '", device, "'"));
  }
  EXPECT_EQ(message([](auto& o) { o.kv_dtype = "fp8"; }, ErrorCode::kUnsupported),
            "kv_dtype fp8: this device has no such KV cache; use f32, f16, bf16 or int8");
  EXPECT_EQ(message([](auto& o) { o.kv_dtype = "q8"; }), "kv_dtype must be auto, f32, f16, bf16 or int8, not 'q8'");
  EXPECT_EQ(message([](auto& o) { o.max_context = -1; }), "max_context must be 0 to 2147483647, not -1");
  EXPECT_EQ(message([](auto& o) { o.max_context = 4097; }), "max_context 4097 exceeds the 4096 positions of the model");
  EXPECT_EQ(message([](auto& o) { o.max_batch_tokens = 0; }), "max_batch_tokens must be 1 to 1048576, not 0");
  EXPECT_EQ(message([](auto& o) { o.max_seqs = 0; }), "max_seqs must be 1 to 65536, not 0");
  EXPECT_EQ(message([](auto& o) { o.page_size = 24; }), "page_size must be a power of two from 16 to 65536, not 24");
  EXPECT_EQ(message([](auto& o) { o.page_size = 8; }), "page_size must be a power of two from 16 to 65536, not 8");
  EXPECT_EQ(message([](auto& o) { o.num_pages = -1; }), "num_pages must be 0 to 2147483647, not -1");
  EXPECT_EQ(message([](auto& o) { o.num_pages = 1 << 30; }),
            "num_pages must be at most 67108863 with pages of 32 tokens, not 1073741824");
  EXPECT_EQ(message([](auto& o) { o.kv_bytes = -1; }), "kv_bytes must be 0 to 9223372036854775807, not -1");
  EXPECT_EQ(message([](auto& o) { o.kv_bytes = 100; }), "kv_bytes 100 does not hold one page of 8192 bytes");
  EXPECT_EQ(message([](auto& o) { o.threads = 1025; }), "threads must be 0 to 1024, not 1025");
  EXPECT_EQ(message_of(ErrorCode::kInvalidArgument, [] { Engine(small(), nullptr); }), "the engine needs a model");
}

// Writes K and V that are known functions of the channel.
class KnownKvModel : public FakeModel {
 public:
  explicit KnownKvModel(float bad = 0.0f) : FakeModel(std::make_shared<FakeControl>()), bad_(bad) {
    info_.vocab_size = 1000;
    info_.kv_layers = {{2, 4, 2}};
  }
  const ModelInfo& info() const override { return info_; }
  size_t workspace_bytes(const StepLimits&) const override { return 0; }
  void forward(const Batch& batch, const ModelMemory& memory, const TensorView& logits, const OpContext&) override {
    KvCache& cache = memory.kv;
    EXPECT_EQ(cache.type(), KvType::kF32);
    EXPECT_EQ(logits.dim(0), 0);
    tokens.assign(batch.token_ids.as<int32_t>(), batch.token_ids.as<int32_t>() + batch.token_ids.dim(0));
    for (int64_t t = 0; t < batch.token_ids.dim(0); ++t) {
      const int64_t slot = batch.slot_mapping.as<int32_t>()[t];
      for (int64_t c = 0; c < 8; ++c) {
        cache.layer(0).key.as<float>()[slot * 8 + c] = (t % 2 == 0 ? 1.0f : -1.0f) * key[static_cast<size_t>(c)];
      }
      for (int64_t c = 0; c < 4; ++c) {
        cache.layer(0).value.as<float>()[slot * 4 + c] = t == 9 && c == 3 ? -5.08f + bad_ : 0.5f;
      }
    }
  }
  std::vector<int32_t> tokens;
  const std::vector<float> key = {1.0f, 2.0f, 3.0f, 0.5f, 0.0f, 0.25f, 0.0f, 0.125f};

 private:
  float bad_;
  ModelInfo info_;
};

TEST(KvCalibration, TakesTheLargestMagnitudeOfAChannelAndItsPartners) {
  KnownKvModel model;
  cpu::ThreadPool pool(1);
  Workspace workspace;
  const OpContext context{&pool, &workspace, cpu::Isa::kScalar, {}};
  const std::vector<KvScales> scales = calibrate_kv(model, 100, context);
  ASSERT_EQ(scales.size(), 1u);
  // Head of four channels: 0 goes with 1 and 2, 1 with 0 and 3, 2 with 3 and 0, 3 with 2 and 1. Floor 3 / 64.
  const std::vector<float> amax = {3.0f, 2.0f, 3.0f, 3.0f, 0.25f, 0.25f, 0.125f, 0.25f};
  ASSERT_EQ(scales[0].key.size(), amax.size());
  for (size_t c = 0; c < amax.size(); ++c) {
    EXPECT_FLOAT_EQ(scales[0].key[c], amax[c] * 1.25f / 127.0f) << c;
  }
  ASSERT_EQ(scales[0].value.size(), 1u);
  EXPECT_FLOAT_EQ(scales[0].value[0], 0.05f);
  // Spread over the vocabulary: no tenth of it is empty, no token comes twice.
  EXPECT_EQ(model.tokens.size(), 100u);
  std::vector<int32_t> sorted = model.tokens;
  std::ranges::sort(sorted);
  EXPECT_EQ(std::ranges::adjacent_find(sorted), sorted.end());
  for (size_t i = 1; i < sorted.size(); ++i) {
    EXPECT_LT(sorted[i] - sorted[i - 1], 100);
  }
}

TEST(KvCalibration, RefusesAModelWhoseKeysAreNotFinite) {
  KnownKvModel model(std::numeric_limits<float>::infinity());
  cpu::ThreadPool pool(1);
  Workspace workspace;
  EXPECT_EQ(message_of(ErrorCode::kModelFormat,
                       [&] {
                         calibrate_kv(model, 512, {&pool, &workspace, cpu::Isa::kScalar, {}});
                       }),
            "calibration of the int8 KV cache: layer 0 stores a value that is not finite");
}

TEST(KvCalibration, IsDoneForAnInt8Cache) {
  EngineOptions options = small();
  options.kv_dtype = "int8";
  auto model = std::make_unique<KnownKvModel>();
  KnownKvModel* seen = model.get();
  const Engine engine(options, std::move(model));
  EXPECT_EQ(seen->tokens.size(), 256u);
  EXPECT_EQ(engine.info().kv_dtype, "int8");
}

// 500 random requests: nothing is lost, nothing hangs, every token is right, every page comes back.
class EngineLoad : public testing::TestWithParam<uint64_t> {};

TEST_P(EngineLoad, LosesNothing) {
  testkit::Random random(GetParam());
  EngineOptions options = small(random.integer(6, 30));
  options.max_context = options.num_pages * options.page_size;
  options.max_batch_tokens = random.integer(1, 100);
  options.max_seqs = random.integer(1, 12);
  options.prefix_cache = random.integer(0, 3) != 0;
  Fixture f(options, random.integer(0, 2) == 0);
  const std::vector<int32_t> shared = prompt_of(options.max_context, GetParam());

  struct Client {
    Request request;
    bool is_cancelled = false;
    std::vector<int32_t> tokens;
  };
  std::map<RequestId, Client> clients;
  int num_submitted = 0;
  const auto collect = [&](RequestId id, std::chrono::milliseconds timeout) {
    Client& client = clients.at(id);
    const RequestUpdate update = f.engine.wait(id, timeout);
    for (const Sampled& token : update.tokens) {
      client.tokens.push_back(token.id);
    }
    if (update.finish == FinishReason::kNone) {
      return;
    }
    const std::vector<int32_t> right = client.request.all_logits ? std::vector<int32_t>() : expected(client.request);
    if (update.finish == FinishReason::kCancelled) {
      EXPECT_TRUE(client.is_cancelled);
      ASSERT_LE(client.tokens.size(), right.size());
      EXPECT_TRUE(std::equal(client.tokens.begin(), client.tokens.end(), right.begin()));
    } else {
      EXPECT_EQ(client.tokens, right);
      EXPECT_EQ(update.num_prompt_done, std::ssize(client.request.prompt));
      EXPECT_TRUE(update.finish == FinishReason::kStop || update.finish == FinishReason::kLength);
    }
    clients.erase(id);
  };
  const auto deadline = std::chrono::steady_clock::now() + 100s;
  while (num_submitted < 100 || !clients.empty()) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "hangs";
    if (num_submitted < 100 && random.integer(0, 1) == 0) {
      const int64_t length = random.integer(1, options.max_context - 1);
      Request request =
          greedy(random.integer(0, 1) == 0 ? std::vector<int32_t>(shared.begin(), shared.begin() + length)
                                           : prompt_of(length, static_cast<uint64_t>(random.integer(0, 5))),
                 random.integer(0, std::min<int64_t>(60, options.max_context - length)));
      request.sampling.temperature = random.integer(0, 1) == 0 ? 0.0f : 0.9f;
      request.sampling.seed = random.bits();
      request.salt = static_cast<uint64_t>(random.integer(0, 3) / 3);
      request.all_logits = random.integer(0, 9) == 0;
      for (int64_t i = random.integer(0, 3); i > 0; --i) {
        request.stop_ids.push_back(static_cast<int32_t>(random.integer(0, kFakeVocab - 1)));
      }
      const RequestId id = f.engine.submit(request).value();
      clients[id] = {request, false, {}};
      ++num_submitted;
    }
    if (clients.empty()) {
      continue;
    }
    auto it = clients.begin();
    std::advance(it, random.integer(0, std::ssize(clients) - 1));
    if (random.integer(0, 40) == 0) {
      it->second.is_cancelled = true;
      f.engine.cancel(it->first);
    }
    collect(it->first, std::chrono::milliseconds(random.integer(0, 1)));
  }
  expect_all_pages_back(f.engine);
}

INSTANTIATE_TEST_SUITE_P(Seeds, EngineLoad, testing::Range<uint64_t>(1, 6));

}  // namespace
}  // namespace shoal
