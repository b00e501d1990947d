// Problems of paged_attention for test and bench: what a step looks like, and memory filled for it.
//
// Everything in a cache that no row may read is poisoned: NaN where the type has one, the largest code otherwise.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ostream>
#include <string>
#include <vector>

#include "shoal/base/checked.h"
#include "shoal/base/float_bits.h"
#include "shoal/cpu/thread_pool.h"
#include "shoal/ops/paged_attention/paged_attention.h"
#include "testkit/testkit.h"

namespace shoal::paged_cases {

enum class Rotary : uint8_t { kNone, kHalf, kInterleaved };

struct Case {
  std::string name = {};
  DType type = DType::kF32;
  DType k_cache = DType::kF16;
  DType v_cache = DType::kF16;
  std::string k_quant = "NONE";
  std::string v_quant = "NONE";
  int64_t num_heads = 4;
  int64_t num_kv_heads = 2;
  int64_t head_dim = 64;
  int64_t v_head_dim = 0;  // not 0: LATENT
  int64_t page_size = 32;
  std::vector<int32_t> past = {33};
  std::vector<int32_t> lens = {1};
  int64_t window = -1;
  float softcap = 0.0f;
  float scale = 0.0f;
  bool sink = false;
  bool causal = true;
  bool norm = false;
  Rotary rotary = Rotary::kNone;
  int64_t rotary_dim = 0;  // 0: head_dim - rotary_offset
  int64_t rotary_offset = 0;
  bool packed = false;
  bool slots = false;         // an explicit slot_mapping with the derived slots, every third token suppressed
  bool unmap_below = false;   // pages wholly below every window are -1
  int64_t extra_columns = 1;  // of the block table, unmapped
  uint64_t seed = 1;
};

inline std::ostream& operator<<(std::ostream& stream, const Case& c) { return stream << c.name << " seed " << c.seed; }

// Values of any float type, for filling and reading tensors.
inline float get(const TensorView& view, int64_t i) {
  switch (view.dtype) {
    case DType::kF16: return f16_to_f32(view.as<uint16_t>()[i]);
    case DType::kBF16: return bf16_to_f32(view.as<uint16_t>()[i]);
    default: return view.as<float>()[i];
  }
}
inline void set(const TensorView& view, int64_t i, float value) {
  switch (view.dtype) {
    case DType::kF16: view.as<uint16_t>()[i] = f32_to_f16(value); break;
    case DType::kBF16: view.as<uint16_t>()[i] = f32_to_bf16(value); break;
    default: view.as<float>()[i] = value; break;
  }
}

class Step {
 public:
  explicit Step(const Case& problem) : c(problem), random_(problem.seed) {
    const int64_t num_seqs = static_cast<int64_t>(c.lens.size());
    for (const int32_t len : c.lens) {
      cu.push_back(cu.back() + len);
    }
    past = c.past;
    num_tokens = cu.back();
    int64_t longest = 0;
    for (size_t b = 0; b < c.lens.size(); ++b) {
      longest = std::max<int64_t>(longest, past[b] + c.lens[b]);
    }
    num_columns = ceil_div(longest, c.page_size) + c.extra_columns;
    make_table(num_seqs);
    latent = c.v_head_dim != 0;
    v_dim = latent ? c.v_head_dim : c.head_dim;

    const int64_t q_width = c.num_heads * c.head_dim;
    const int64_t kv_width = c.num_kv_heads * c.head_dim;
    query = values({num_tokens, c.packed ? q_width + 2 * kv_width : q_width}, 1.0f);
    if (!c.packed) {
      key = values({num_tokens, kv_width}, 1.0f);
      value = values({num_tokens, kv_width}, 1.0f);
    }
    if (c.sink) {
      sink = values({c.num_heads}, 1.0f);
    }
    if (c.norm) {
      q_norm = values({c.head_dim}, 1.0f);
      k_norm = values({c.head_dim}, 1.0f);
    }
    if (c.rotary != Rotary::kNone) {
      make_rotary(longest);
    }
    k_scale = scales(c.k_quant, c.k_cache);
    v_scale = scales(c.v_quant, c.v_cache);
    k_pool = make_cache(c.k_cache);
    v_pool = make_cache(c.v_cache);
    fill_history();
    if (c.slots) {
      for (int64_t t = 0; t < num_tokens; ++t) {
        slot_map.push_back(t % 3 == 2 ? -1 : static_cast<int32_t>(slot_of(seq_of(t), pos_of(t))));
      }
      // Suppressed tokens attend to what the cache holds at their position.
      for (int64_t t = 2; t < num_tokens; t += 3) {
        fill_slot(slot_of(seq_of(t), pos_of(t)));
      }
    }
    output.assign(static_cast<size_t>(num_tokens * c.num_heads * v_dim) * size_of(c.type) + 2 * kGuard, kGuardByte);
  }

  PagedAttentionArgs args() {
    PagedAttentionArgs a;
    const int64_t num_seqs = static_cast<int64_t>(past.size());
    a.output = TensorView(output.data() + kGuard, c.type, {num_tokens, c.num_heads * v_dim});
    a.query = query;
    if (!c.packed) {
      a.key = key;
      if (!latent) {
        a.value = value;
      }
    }
    a.key_cache = k_pool;
    if (!latent) {
      a.value_cache = v_pool;
    }
    a.cumulative_sequence_length = TensorView(cu.data(), DType::kI32, {num_seqs + 1});
    a.past_seqlens = TensorView(past.data(), DType::kI32, {num_seqs});
    a.block_table = TensorView(table.data(), DType::kI32, {num_seqs, num_columns});
    if (c.rotary != Rotary::kNone) {
      a.cos_cache = cos;
      a.sin_cache = sin;
      a.do_rotary = true;
      a.rotary_interleaved = c.rotary == Rotary::kInterleaved;
      a.rotary_offset = c.rotary_offset;
    }
    if (!slot_map.empty()) {
      a.slot_mapping = TensorView(slot_map.data(), DType::kI32, {num_tokens});
    }
    if (c.sink) {
      a.head_sink = sink;
    }
    if (c.norm) {
      a.q_norm_weight = q_norm;
      a.k_norm_weight = k_norm;
    }
    if (c.k_quant != "NONE") {
      a.k_scale = k_scale;
    }
    if (c.v_quant != "NONE" && !latent) {
      a.v_scale = v_scale;
    }
    a.num_heads = c.num_heads;
    a.kv_num_heads = c.num_kv_heads;
    a.scale = c.scale;
    a.softcap = c.softcap;
    a.local_window_size = c.window;
    a.is_causal = c.causal;
    a.k_quant_type = c.k_quant;
    a.k_cache_dtype = c.k_cache == DType::kU8 ? "int4" : "";
    if (!latent) {
      a.v_quant_type = c.v_quant;
      a.v_cache_dtype = c.v_cache == DType::kU8 ? "int4" : "";
    }
    a.kv_cache_layout = latent ? "LATENT" : "SEPARATE";
    a.v_head_size = latent ? c.v_head_dim : 0;
    return a;
  }

  int64_t seq_of(int64_t t) const {
    int64_t b = 0;
    while (t >= cu[static_cast<size_t>(b + 1)]) {
      ++b;
    }
    return b;
  }
  int64_t pos_of(int64_t t) const {
    const auto b = static_cast<size_t>(seq_of(t));
    return past[b] + t - cu[b];
  }
  int64_t slot_of(int64_t b, int64_t pos) const {
    const int32_t page = table[static_cast<size_t>(b * num_columns + pos / c.page_size)];
    return page < 0 ? -1 : page * c.page_size + pos % c.page_size;
  }
  // One head of one slot; null if the cache is absent.
  std::byte* head_of(const TensorView& pool, int64_t slot, int64_t kv_head) const {
    const int64_t head_bytes = pool.dim(3) * static_cast<int64_t>(size_of(pool.dtype));
    return pool.as<std::byte>() + (slot * c.num_kv_heads + kv_head) * head_bytes;
  }
  std::vector<float> result() const {
    std::vector<float> out(static_cast<size_t>(num_tokens * c.num_heads * v_dim));
    const TensorView view(const_cast<uint8_t*>(output.data()) + kGuard, c.type, {static_cast<int64_t>(out.size())});
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = get(view, static_cast<int64_t>(i));
    }
    return out;
  }
  std::vector<uint8_t> cache_bytes() const {
    const auto* k = k_pool.view().as<uint8_t>();
    const auto* v = v_pool.view().as<uint8_t>();
    std::vector<uint8_t> bytes(k, k + k_pool.view().num_bytes());
    bytes.insert(bytes.end(), v, v + v_pool.view().num_bytes());
    return bytes;
  }
  void poison_output() { std::fill(output.begin() + kGuard, output.end() - kGuard, uint8_t{0xff}); }
  bool guards_intact() const {
    return std::all_of(output.begin(), output.begin() + kGuard, [](uint8_t x) { return x == kGuardByte; }) &&
           std::all_of(output.end() - kGuard, output.end(), [](uint8_t x) { return x == kGuardByte; });
  }
  // New random codes or values in one slot, as an earlier step could have left them.
  void fill_slot(int64_t slot) {
    for (int64_t kv_head = 0; slot >= 0 && kv_head < c.num_kv_heads; ++kv_head) {
      for (const Tensor* pool : {&k_pool, &v_pool}) {
        fill_head(head_of(*pool, slot, kv_head), pool->view().dtype);
      }
    }
  }
  void poison(const Tensor& pool) const {
    const TensorView& view = pool.view();
    const int byte = view.dtype == DType::kI8 ? 0x7f : 0xff;
    std::memset(view.data, byte, view.num_bytes());
  }

  static constexpr size_t kGuard = 64;
  static constexpr uint8_t kGuardByte = 0xa5;
  Case c;
  bool latent = false;
  int64_t v_dim = 0;
  int64_t num_tokens = 0;
  int64_t num_columns = 0;
  int64_t num_pages = 0;
  std::vector<int32_t> cu = {0};
  std::vector<int32_t> past;
  std::vector<int32_t> table;
  std::vector<int32_t> slot_map;
  std::vector<uint8_t> output;
  Tensor query, key, value, k_pool, v_pool, cos, sin, sink, q_norm, k_norm, k_scale, v_scale;

 private:
  Tensor values(std::vector<int64_t> shape, float deviation) {
    Tensor tensor(c.type, shape);
    for (int64_t i = 0; i < tensor.view().num_elements(); ++i) {
      set(tensor, i, random_.normal() * deviation);
    }
    return tensor;
  }

  // Pages in random order; as many spare ones as used.
  void make_table(int64_t num_seqs) {
    table.assign(static_cast<size_t>(num_seqs * num_columns), -1);
    std::vector<int32_t*> used;
    for (int64_t b = 0; b < num_seqs; ++b) {
      const auto seq = static_cast<size_t>(b);
      const int64_t len = past[seq] + c.lens[seq];
      const int64_t first = c.unmap_below && c.window > 0 ? std::max<int64_t>(0, past[seq] - c.window + 1) : 0;
      for (int64_t i = first / c.page_size; i * c.page_size < len; ++i) {
        used.push_back(&table[static_cast<size_t>(b * num_columns + i)]);
      }
    }
    num_pages = static_cast<int64_t>(used.size()) + 3;
    std::vector<int32_t> ids(static_cast<size_t>(num_pages));
    for (size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<int32_t>(i);
    }
    for (size_t i = ids.size(); i > 1; --i) {
      std::swap(ids[i - 1], ids[static_cast<size_t>(random_.integer(0, static_cast<int64_t>(i) - 1))]);
    }
    for (size_t i = 0; i < used.size(); ++i) {
      *used[i] = ids[i];
    }
  }

  void make_rotary(int64_t longest) {
    const int64_t half = (c.rotary_dim == 0 ? c.head_dim - c.rotary_offset : c.rotary_dim) / 2;
    cos = Tensor(c.type, {longest + 1, half});
    sin = Tensor(c.type, {longest + 1, half});
    for (int64_t pos = 0; pos <= longest; ++pos) {
      for (int64_t i = 0; i < half; ++i) {
        const double angle =
            static_cast<double>(pos) * std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(half));
        set(cos, pos * half + i, static_cast<float>(std::cos(angle)));
        set(sin, pos * half + i, static_cast<float>(std::sin(angle)));
      }
    }
  }

  Tensor scales(const std::string& quant, DType cache) {
    const float step = cache == DType::kI8 ? 3.0f / 127.0f : cache == DType::kU8 ? 3.0f / 7.0f : 3.0f / 448.0f;
    if (quant != "PER_CHANNEL") {
      Tensor scale(DType::kF32, {1});
      scale.span<float>()[0] = step;
      return scale;
    }
    Tensor scale(DType::kF32, {c.num_kv_heads, 1, c.head_dim});
    for (float& s : scale.span<float>()) {
      s = step * random_.uniform(0.5f, 1.5f) * (random_.integer(0, 9) == 0 ? -1.0f : 1.0f);
    }
    return scale;
  }

  Tensor make_cache(DType type) const {
    Tensor cache(type, {num_pages, c.page_size, c.num_kv_heads, type == DType::kU8 ? c.head_dim / 2 : c.head_dim});
    poison(cache);
    return cache;
  }

  void fill_head(std::byte* head, DType type) {
    for (int64_t i = 0; i < c.head_dim; ++i) {
      const float x = random_.normal();
      switch (type) {
        case DType::kF32:
        case DType::kF16:
        case DType::kBF16: set(TensorView(head, type, {c.head_dim}), i, x); break;
        case DType::kF8E4M3: reinterpret_cast<uint8_t*>(head)[i] = f32_to_e4m3(x * 150.0f); break;
        case DType::kI8:
          reinterpret_cast<int8_t*>(head)[i] = static_cast<int8_t>(std::clamp(x * 42.0f, -128.0f, 127.0f));
          break;
        default: {
          auto* byte = reinterpret_cast<uint8_t*>(head) + i / 2;
          const auto nibble = static_cast<uint8_t>(random_.integer(0, 15));
          *byte = static_cast<uint8_t>(i % 2 == 0 ? nibble : (*byte & 15) | nibble << 4);
        }
      }
    }
  }

  void fill_history() {
    for (size_t b = 0; b < past.size(); ++b) {
      const int64_t first = c.unmap_below && c.window > 0 ? std::max<int64_t>(0, past[b] - c.window + 1) : 0;
      for (int64_t pos = first; pos < past[b]; ++pos) {
        fill_slot(slot_of(static_cast<int64_t>(b), pos));
      }
    }
  }

  testkit::Random random_;
};

// Small problems that together touch every feature, format and edge of a tile, page and span.
inline std::vector<Case> feature_cases() {
  std::vector<Case> cases;
  const auto add = [&](Case c, const std::string& name) {
    c.name = name;
    c.seed = cases.size() + 1;
    cases.push_back(c);
  };
  const DType kF32 = DType::kF32;
  const DType kF16 = DType::kF16;
  const DType kBF16 = DType::kBF16;
  for (const int64_t head_dim : {8, 32, 40, 64, 80, 96, 128, 160, 192, 224, 256}) {
    add({.type = kF16, .head_dim = head_dim, .past = {66, 0}, .lens = {3, 5}}, concat("f16_h", head_dim));
  }
  const std::vector<std::pair<int64_t, int64_t>> heads = {{6, 6}, {6, 3}, {9, 3}, {8, 1}, {12, 2}, {16, 1}, {3, 1}};
  for (const auto& [n, nk] : heads) {
    add({.num_heads = n, .num_kv_heads = nk, .past = {63, 130}, .lens = {1, 1}}, concat("decode_n", n, "_", nk));
    add({.type = kBF16, .num_heads = n, .num_kv_heads = nk, .past = {5}, .lens = {70}},
        concat("prefill_n", n, "_", nk));
  }
  for (const int64_t page : {16, 32, 64, 128, 256, 512}) {
    add({.type = kF16, .page_size = page, .past = {31, 200}, .lens = {33, 17}, .packed = true}, concat("page", page));
  }
  for (const DType cache : {kF32, kF16, kBF16}) {
    for (const DType type : {kF32, kF16, kBF16}) {
      add({.type = type, .k_cache = cache, .v_cache = cache, .past = {10, 64}, .lens = {7, 1}},
          concat(to_string(type), "_cache_", to_string(cache)));
    }
  }
  for (const DType k : {DType::kI8, DType::kF8E4M3, DType::kU8}) {
    for (const char* quant : {"PER_TENSOR", "PER_CHANNEL"}) {
      for (const DType type : {kF32, kF16, kBF16}) {
        Case c = {.type = type, .k_cache = k, .v_cache = k, .k_quant = quant, .v_quant = quant};
        c.past = {33, 0, 65};
        c.lens = {1, 9, 3};
        add(c, concat(to_string(type), "_", to_string(k), "_", quant));
      }
    }
    Case c = {.type = kF16, .k_cache = k, .v_cache = k, .k_quant = "PER_TENSOR", .v_quant = "PER_CHANNEL"};
    c.head_dim = 96;
    c.past = {100};
    c.lens = {30};
    c.norm = true;
    c.slots = true;
    c.rotary = Rotary::kHalf;
    add(c, concat("norm_slots_rotary_", to_string(k)));
    c.norm = false;
    c.window = 20;
    c.softcap = 5.0f;
    c.sink = true;
    add(c, concat("window_softcap_sink_", to_string(k)));
  }
  add({.k_cache = DType::kI8,
       .v_cache = DType::kU8,
       .k_quant = "PER_CHANNEL",
       .v_quant = "PER_TENSOR",
       .past = {40, 3},
       .lens = {2, 66}},
      "int8_keys_int4_values");
  add({.k_cache = DType::kU8, .v_cache = kBF16, .k_quant = "PER_CHANNEL", .past = {40}, .lens = {66}},
      "int4_keys_bf16_values");
  add({.k_cache = kF32, .v_cache = DType::kF8E4M3, .v_quant = "PER_CHANNEL", .past = {400}, .lens = {1}},
      "f32_keys_f8_values");
  for (const DType type : {kF32, kF16, kBF16}) {
    const std::string t(to_string(type));
    add({.type = type, .num_heads = 8, .past = {95, 60}, .lens = {33, 4}, .sink = true}, t + "_sink");
    add({.type = type, .past = {95, 60}, .lens = {33, 4}, .softcap = 50.0f}, t + "_softcap");
    add({.type = type, .past = {95, 60}, .lens = {33, 4}, .window = 4, .softcap = 2.0f, .sink = true}, t + "_all");
    add({.type = type, .head_dim = 80, .past = {95, 60}, .lens = {33, 4}, .norm = true}, t + "_norm");
    for (const Rotary rotary : {Rotary::kHalf, Rotary::kInterleaved}) {
      const std::string r = rotary == Rotary::kHalf ? "_rotary" : "_interleaved";
      add({.type = type, .past = {95, 0}, .lens = {33, 40}, .rotary = rotary, .packed = true}, t + r);
      add({.type = type,
           .past = {9},
           .lens = {33},
           .norm = true,
           .rotary = rotary,
           .rotary_dim = 32,
           .rotary_offset = 16},
          t + r + "_offset");
    }
    add({.type = type, .past = {65, 1}, .lens = {20, 3}, .causal = false}, t + "_bidirectional");
    add({.type = type,
         .past = {65, 1},
         .lens = {20, 80},
         .window = 4,
         .causal = false,
         .rotary = Rotary::kHalf,
         .packed = true},
        t + "_bidirectional_window");
    add({.type = type, .past = {20, 0}, .lens = {70, 5}, .slots = true}, t + "_slots");
  }
  for (const int64_t window : {1, 16, 63, 64, 65, 129, 100000}) {
    add({.past = {300, 0}, .lens = {90, 100}, .window = window, .unmap_below = true}, concat("window", window));
    add({.num_heads = 4, .num_kv_heads = 1, .past = {513, 138}, .lens = {3, 8}, .window = window, .unmap_below = true},
        concat("verify_window", window));
  }
  const std::vector<std::vector<int32_t>> ragged = {{10, 0, 0, 0}, {0, 7, 0, 3}, {65, 0},
                                                    {3, 0, 0, 1},  {2, 0},       {1, 1, 1}};
  for (const auto& lens : ragged) {
    add({.type = kF16, .past = std::vector<int32_t>(lens.size(), 17), .lens = lens, .rotary = Rotary::kHalf},
        concat("ragged_", lens.front(), "_of_", lens.size()));
  }
  std::vector<int32_t> many(300);
  for (size_t b = 0; b < many.size(); ++b) {
    many[b] = static_cast<int32_t>(b * 7 % 3);
  }
  add({.type = kF16,
       .num_heads = 2,
       .num_kv_heads = 1,
       .head_dim = 16,
       .page_size = 16,
       .past = std::vector<int32_t>(300, 5),
       .lens = many},
      "batch300");
  add({.num_heads = 2, .num_kv_heads = 1, .head_dim = 32, .past = {1020}, .lens = {1}}, "decode_1021");
  add({.num_heads = 3, .num_kv_heads = 1, .head_dim = 32, .past = {2047, 1023}, .lens = {2, 3}}, "spans");
  add({.num_heads = 3, .num_kv_heads = 1, .head_dim = 32, .past = {4000}, .lens = {1}, .sink = true}, "decode_4001");
  add({.num_heads = 4, .num_kv_heads = 2, .head_dim = 32, .past = {990}, .lens = {130}}, "prefill_across_a_span");
  add({.num_heads = 4,
       .num_kv_heads = 1,
       .head_dim = 256,
       .past = {600},
       .lens = {40},
       .window = 512,
       .norm = true,
       .rotary = Rotary::kHalf},
      "gemma3");
  Case mla = {.type = kF16, .num_heads = 16, .num_kv_heads = 1, .head_dim = 576, .v_head_dim = 512, .page_size = 16};
  mla.k_cache = mla.v_cache = kF16;
  mla.past = {9, 5};
  mla.lens = {4, 6};
  mla.scale = 0.0722f;
  mla.rotary = Rotary::kInterleaved;
  mla.rotary_offset = 512;
  add(mla, "latent");
  mla.window = 5;
  mla.softcap = 3.0f;
  add(mla, "latent_window_softcap");
  mla.type = kBF16;
  mla.k_quant = "PER_CHANNEL";
  mla.k_cache = DType::kI8;
  add(mla, "latent_int8");
  mla.k_quant = "PER_TENSOR";
  mla.k_cache = DType::kF8E4M3;
  mla.past = {70, 0};
  mla.lens = {1, 1};
  add(mla, "latent_f8_decode");
  Case narrow = {.type = kF32,
                 .num_heads = 2,
                 .num_kv_heads = 1,
                 .head_dim = 32,
                 .v_head_dim = 20,
                 .past = {70, 3},
                 .lens = {1, 9},
                 .scale = 0.3f};
  add(narrow, "latent_narrow");
  return cases;
}

inline void run(Step& step, const PagedAttentionArgs& args, std::string_view variant, cpu::Isa isa,
                cpu::ThreadPool& pool) {
  step.poison_output();
  Workspace workspace(paged_attention_workspace_bytes(args, pool.num_threads()));
  paged_attention(args, {&pool, &workspace, isa, variant});
}

inline Case three_sequences() {
  return {.num_heads = 4, .num_kv_heads = 2, .head_dim = 16, .page_size = 16, .past = {5, 7, 9}, .lens = {2, 3, 4}};
}

}  // namespace shoal::paged_cases
