// Slots that are handed out and taken back; rollback to every accepted prefix, through the operators that own the
// states, against calls that never saw the rejected tokens.
#include "shoal/state/state_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/causal_conv/causal_conv.h"
#include "shoal/ops/delta_net/delta_net.h"
#include "shoal/ops/element.h"
#include "testkit/expect_error.h"
#include "testkit/testkit.h"

namespace shoal {
namespace {

using testkit::expect_error;
using Bytes = std::vector<uint8_t>;

constexpr StateLayerShape kBoth{.conv_dtype = DType::kBF16,
                                .conv_channels = 70,
                                .conv_reach = 3,
                                .num_heads = 4,
                                .num_key_heads = 2,
                                .value_size = 5,
                                .key_size = 12};
constexpr StateLayerShape kConv{.conv_dtype = DType::kF32, .conv_channels = 9, .conv_reach = 10};
constexpr StateLayerShape kNet{
    .num_heads = 2, .num_key_heads = 1, .value_size = 16, .key_size = 8, .decay_per_key = true};
constexpr StateLayerShape kNone{};  // an attention layer

const std::vector<StateLayerShape>& layers() {
  static const std::vector<StateLayerShape> list = {kBoth, kNone, kConv, kNet};
  return list;
}

Bytes bytes_of(const TensorView& view) {
  const auto* data = view.as<const uint8_t>();
  return {data, data + view.num_bytes()};
}

std::vector<TensorView> states_of(const StatePool& pool, StateSlot slot) {
  std::vector<TensorView> views;
  for (size_t i = 0; i < layers().size(); ++i) {
    if (layers()[i].conv_channels > 0) {
      views.push_back(pool.conv_state(i, slot));
    }
    if (layers()[i].num_heads > 0) {
      views.push_back(pool.recurrent_state(i, slot));
    }
  }
  return views;
}

Bytes all_bytes(const StatePool& pool, StateSlot slot) {
  Bytes all;
  for (const TensorView& view : states_of(pool, slot)) {
    const Bytes bytes = bytes_of(view);
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  return all;
}

TEST(StatePool, HandsOutEverySlotOnceAndZero) {
  StatePool pool(layers(), 3, 8);
  testkit::Random random(1);
  std::vector<StateSlot> held;
  for (int step = 0; step < 500; ++step) {
    if (random.integer(0, 1) == 0) {
      const std::optional<StateSlot> slot = pool.acquire();
      ASSERT_EQ(slot.has_value(), held.size() < 3);
      if (slot) {
        ASSERT_EQ(std::count(held.begin(), held.end(), *slot), 0);
        const Bytes bytes = all_bytes(pool, *slot);
        ASSERT_EQ(bytes, Bytes(bytes.size(), 0));
        for (const TensorView& view : states_of(pool, *slot)) {
          std::memset(view.data, 0xff, view.num_bytes());
        }
        held.push_back(*slot);
      }
    } else if (!held.empty()) {
      const auto place = held.begin() + random.integer(0, static_cast<int64_t>(held.size()) - 1);
      pool.release(*place);
      held.erase(place);
    }
    ASSERT_EQ(pool.num_free(), 3 - static_cast<int64_t>(held.size()));
  }
  EXPECT_EQ(pool.num_slots(), 3);
}

TEST(StatePool, ViewsDoNotOverlap) {
  StatePool pool(layers(), 2, 3);
  std::vector<TensorView> views;
  for (StateSlot slot = 0; slot < 2; ++slot) {
    for (size_t i : {0u, 2u}) {
      views.push_back(pool.conv_state(i, slot));
      views.push_back(pool.conv_capture(i, slot));
    }
    for (size_t i : {0u, 3u}) {
      views.push_back(pool.recurrent_state(i, slot));
      views.push_back(pool.recurrent_capture(i, slot));
    }
  }
  int64_t total = 0;
  std::vector<std::pair<uintptr_t, uintptr_t>> ranges;
  for (const TensorView& view : views) {
    EXPECT_TRUE(view.is_contiguous());
    const auto begin = reinterpret_cast<uintptr_t>(view.data);
    ranges.emplace_back(begin, begin + view.num_bytes());
    total += static_cast<int64_t>(view.num_bytes());
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    EXPECT_LE(ranges[i - 1].second, ranges[i].first);
  }
  EXPECT_EQ(StatePool::bytes_per_slot(layers(), 3) * 2, total);
  const auto shape = [](const TensorView& view) {
    return std::vector<int64_t>(view.dims().begin(), view.dims().end());
  };
  EXPECT_EQ(shape(pool.conv_state(0, 0, 2)), (std::vector<int64_t>{2, 70, 3}));
  EXPECT_EQ(shape(pool.conv_capture(0, 0, 2)), (std::vector<int64_t>{2, 3, 70}));
  EXPECT_EQ(shape(pool.conv_scratch(0, 2)), (std::vector<int64_t>{2, 70, 3}));
  EXPECT_EQ(shape(pool.recurrent_state(0, 1)), (std::vector<int64_t>{1, 4, 5, 12}));
  EXPECT_EQ(shape(pool.recurrent_capture(0, 1)), (std::vector<int64_t>{1, 3 * (4 + 2 * 12 + 4 * 5)}));
  EXPECT_EQ(shape(pool.recurrent_capture(3, 1)), (std::vector<int64_t>{1, 3 * (2 * 8 + 8 + 2 * 16)}));
  EXPECT_EQ(pool.recurrent_state(0, 0, 2).rows(1, 2).data, pool.recurrent_state(0, 1).data);
}

TEST(StatePool, CopiesStates) {
  StatePool pool(layers(), 3, 1);
  const StateSlot from = *pool.acquire(), to = *pool.acquire(), other = *pool.acquire();
  uint8_t value = 1;
  for (const TensorView& view : states_of(pool, from)) {
    std::memset(view.data, value++, view.num_bytes());
  }
  pool.copy(from, to);
  EXPECT_EQ(all_bytes(pool, to), all_bytes(pool, from));
  const Bytes untouched = all_bytes(pool, other);
  EXPECT_EQ(untouched, Bytes(untouched.size(), 0));
  pool.copy(to, to);
  EXPECT_EQ(all_bytes(pool, to), all_bytes(pool, from));
}

TEST(StatePool, RejectsWhatItCannotHold) {
  const auto rejects = [](std::string_view message, StateLayerShape shape, int64_t num_slots = 1, int64_t capture = 8) {
    expect_error(ErrorCode::kInvalidArgument, message, [&] { StatePool({kNone, shape}, num_slots, capture); });
  };
  rejects("num_slots must be 1 to 2147483647, not 0", kConv, 0);
  rejects("num_slots must be 1 to 2147483647, not 2147483648", kConv, int64_t{1} << 31);
  rejects("capture_capacity must be 0 to 8, not 9", kConv, 1, 9);
  rejects("capture_capacity must be 0 to 8, not -1", kConv, 1, -1);
  rejects("state layer 1: conv_channels and conv_reach must both be positive or both 0, not 4 and 0",
          {.conv_channels = 4});
  rejects("state layer 1: conv_dtype is int8", {.conv_dtype = DType::kI8, .conv_channels = 4, .conv_reach = 1});
  rejects("state layer 1: num_heads must be a multiple of num_key_heads, not 3 and 2",
          {.num_heads = 3, .num_key_heads = 2, .value_size = 1, .key_size = 1});
  rejects("state layer 1: num_heads must be a multiple of num_key_heads, not -2 and 1",
          {.num_heads = -2, .num_key_heads = 1, .value_size = 1, .key_size = 1});
  rejects("state layer 1: value_size and key_size must be positive, not 0 and 1",
          {.num_heads = 2, .num_key_heads = 2, .key_size = 1});
  const int64_t huge = int64_t{1} << 40;
  const auto too_large = [](const StateLayerShape& shape) {
    expect_error(ErrorCode::kOutOfMemory, "do not fit the address space", [&] { StatePool({shape}, 1, 0); });
  };
  too_large({.conv_channels = huge, .conv_reach = huge});
  too_large({.num_heads = huge, .num_key_heads = 1, .value_size = huge, .key_size = 1});
  expect_error(ErrorCode::kOutOfMemory, "do not fit the address space",
               [&] { StatePool({{.conv_channels = huge, .conv_reach = 1 << 19}}, 1 << 20, 0); });
}

TEST(StatePool, MisuseIsNoticed) {
  cpu::ThreadPool threads(1);
  StatePool pool(layers(), 2, 4);
  const StateSlot slot = *pool.acquire();
  const StateSlot unused = 1 - slot;
  const auto notices = [](auto&& body) { expect_error(ErrorCode::kInternal, "", body); };
  notices([&] { pool.release(unused); });
  notices([&] { pool.release(2); });
  notices([&] { pool.release(-1); });
  notices([&] { pool.copy(slot, unused); });
  notices([&] { pool.copy(unused, slot); });
  notices([&] { pool.commit(unused, 1, threads); });
  notices([&] { pool.commit(slot, 5, threads); });
  notices([&] { pool.commit(slot, -1, threads); });
  notices([&] { pool.conv_state(0, slot, 3); });
  notices([&] { pool.conv_state(1, slot); });
  notices([&] { pool.recurrent_state(2, slot); });
  notices([&] { pool.recurrent_state(4, slot); });
  pool.release(slot);
  notices([&] { pool.release(slot); });
  const StatePool plain(layers(), 1, 0);
  EXPECT_FALSE(plain.conv_capture(0, 0));
  EXPECT_FALSE(plain.recurrent_capture(0, 0));
}

// The layers' operators on the tokens of a stream that depends on nothing but position and sequence.
class Stream {
 public:
  static constexpr int64_t kLength = 40;

  Stream(uint64_t seed, const OpContext& with) : context(with) {
    testkit::Random random(seed);
    for (const StateLayerShape& s : layers()) {
      Inputs in;
      in.conv_input = tensor(random, s.conv_dtype, {kLength, s.conv_channels});
      in.query = tensor(random, DType::kBF16, {kLength, s.num_key_heads, s.key_size});
      in.key = tensor(random, DType::kBF16, {kLength, s.num_key_heads, s.key_size});
      in.value = tensor(random, DType::kBF16, {kLength, s.num_heads, s.value_size});
      in.decay = s.decay_per_key ? tensor(random, DType::kF32, {kLength, s.num_heads, s.key_size})
                                 : tensor(random, DType::kF32, {kLength, s.num_heads});
      in.beta = tensor(random, DType::kF32, {kLength, s.num_heads});
      for (float& value : in.decay.span<float>()) {
        value = -std::abs(value);
      }
      testkit::Random weights(99);  // the same in every stream
      const int64_t taps = s.conv_dtype == DType::kF32 ? 6 : 4;
      in.weight = tensor(weights, s.conv_dtype, {s.conv_channels, 1, taps});
      inputs.push_back(std::move(in));
    }
  }

  // Tokens [begin, end) in the states of `slot`, in place; `verify` keeps the states and captures instead. Returns the
  // outputs.
  Bytes run(const StatePool& pool, StateSlot slot, int64_t begin, int64_t end, bool verify) {
    Bytes outputs;
    for (size_t i = 0; i < layers().size(); ++i) {
      const StateLayerShape& s = layers()[i];
      if (s.conv_channels > 0) {
        append(outputs, convolve(pool, i, slot, begin, end, verify));
      }
      if (s.num_heads > 0) {
        append(outputs, recur(pool, i, slot, begin, end, verify));
      }
    }
    return outputs;
  }

 private:
  struct Inputs {
    Tensor conv_input, weight, query, key, value, decay, beta;
  };

  static Tensor tensor(testkit::Random& random, DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t(dtype, shape);
    for (int64_t i = 0; i < t.view().num_elements(); ++i) {
      write_element(dtype, t.view().data, i, random.normal());
    }
    return t;
  }
  static void append(Bytes& to, const TensorView& view) {
    const Bytes bytes = bytes_of(view);
    to.insert(to.end(), bytes.begin(), bytes.end());
  }

  Tensor convolve(const StatePool& pool, size_t i, StateSlot slot, int64_t begin, int64_t end, bool verify) {
    const StateLayerShape& s = layers()[i];
    std::vector<int32_t> offsets = {0, static_cast<int32_t>(end - begin)};
    int32_t count = StatePool::kMaxCapture;
    Tensor output(s.conv_dtype, {end - begin, s.conv_channels});
    VarlenCausalConvWithStateArgs a;
    a.output = output;
    a.input = inputs[i].conv_input.view().rows(begin, end);
    a.weight = inputs[i].weight;
    a.dilation = s.conv_reach / (a.weight.dim(2) - 1);
    a.activation = "silu";
    a.cumulative_sequence_length = TensorView(offsets.data(), DType::kI32, {2});
    a.initial_state = pool.conv_state(i, slot);
    a.final_state = verify ? pool.conv_scratch(i) : a.initial_state;
    if (verify) {
      a.state_update = pool.conv_capture(i, slot);
      a.state_update_capacity = pool.capture_capacity();
      a.capture_count = TensorView(&count, DType::kI32, {1});
    }
    varlen_causal_conv_with_state(a, context);
    return output;
  }

  Tensor recur(const StatePool& pool, size_t i, StateSlot slot, int64_t begin, int64_t end, bool verify) {
    const StateLayerShape& s = layers()[i];
    std::vector<int32_t> offsets = {0, static_cast<int32_t>(end - begin)};
    int32_t count = StatePool::kMaxCapture;
    Tensor output(DType::kBF16, {end - begin, s.num_heads, s.value_size});
    GatedDeltaNetArgs a;
    a.output = output;
    a.query = inputs[i].query.view().rows(begin, end);
    a.key = inputs[i].key.view().rows(begin, end);
    a.value = inputs[i].value.view().rows(begin, end);
    a.decay = inputs[i].decay.view().rows(begin, end);
    a.beta = inputs[i].beta.view().rows(begin, end);
    a.cu_seqlens = TensorView(offsets.data(), DType::kI32, {2});
    a.beta_activation = "sigmoid";
    a.qk_l2_norm = 1;
    a.initial_state = pool.recurrent_state(i, slot);
    if (verify) {
      a.state_update = pool.recurrent_capture(i, slot);
      a.state_update_capacity = pool.capture_capacity();
      a.capture_count = TensorView(&count, DType::kI32, {1});
    } else {
      a.final_state = a.initial_state;
    }
    Workspace workspace(gated_delta_net_workspace_bytes(a, context.pool->num_threads()));
    OpContext with = context;
    with.workspace = &workspace;
    gated_delta_net(a, with);
    return output;
  }

  OpContext context;
  std::vector<Inputs> inputs;
};

TEST(StatePool, CommitsEveryAcceptedPrefixBitForBit) {
  cpu::ThreadPool threads(2);
  cpu::ThreadPool one(1);
  for (const cpu::Isa isa : cpu::available_isas()) {
    SCOPED_TRACE(cpu::to_string(isa));
    const OpContext context{.pool = &threads, .isa = isa};
    for (const int64_t num_drafted : {1, 3, 8}) {
      for (int64_t accepted = 0; accepted <= num_drafted; ++accepted) {
        StatePool pool(layers(), 3, 8);
        const StateSlot speculating = *pool.acquire(), plain = *pool.acquire(), bystander = *pool.acquire();
        Stream stream(7, context);
        const int64_t past = 11;
        for (const StateSlot slot : {speculating, plain, bystander}) {
          stream.run(pool, slot, 0, past, /*verify=*/false);
        }
        const Bytes before = all_bytes(pool, bystander);
        const Bytes drafted = stream.run(pool, speculating, past, past + num_drafted, /*verify=*/true);
        EXPECT_EQ(all_bytes(pool, speculating), before) << "a step that verifies changed the states";
        pool.commit(speculating, accepted, accepted % 2 == 0 ? threads : one);
        if (accepted > 0) {
          const Bytes outputs = stream.run(pool, plain, past, past + accepted, /*verify=*/false);
          EXPECT_EQ(outputs == drafted, accepted == num_drafted);
        }
        EXPECT_EQ(all_bytes(pool, speculating), all_bytes(pool, plain)) << accepted << " of " << num_drafted;
        EXPECT_EQ(all_bytes(pool, bystander), before);
        // Other tokens follow, drafted again: as if nothing had been rejected.
        Stream other(8, context);
        EXPECT_EQ(other.run(pool, speculating, 20, 25, /*verify=*/true),
                  other.run(pool, plain, 20, 25, /*verify=*/false));
        pool.commit(speculating, 5, threads);
        EXPECT_EQ(all_bytes(pool, speculating), all_bytes(pool, plain));
      }
    }
  }
}

// Tokens one at a time leave the same states as all at once, so that it does not matter how the accepted ones ran.
TEST(StatePool, SingleTokensAgreeWithCommits) {
  cpu::ThreadPool threads(2);
  const OpContext context{.pool = &threads, .isa = cpu::available_isas().back()};
  StatePool pool(layers(), 2, 8);
  const StateSlot speculating = *pool.acquire(), plain = *pool.acquire();
  Stream stream(3, context);
  testkit::Random random(5);
  for (int64_t past = 0; past + 8 <= Stream::kLength;) {
    const int64_t accepted = random.integer(1, 8);
    stream.run(pool, speculating, past, past + 8, /*verify=*/true);
    pool.commit(speculating, accepted, threads);
    for (int64_t t = past; t < past + accepted; ++t) {
      stream.run(pool, plain, t, t + 1, /*verify=*/false);
    }
    past += accepted;
    ASSERT_EQ(all_bytes(pool, speculating), all_bytes(pool, plain)) << past;
  }
}

}  // namespace
}  // namespace shoal
