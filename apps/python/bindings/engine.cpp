// Engine, its options, requests and updates. Every call that can wait or work releases the interpreter lock.
#include "shoal/engine/engine.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>

#include "apps/python/bindings/bindings.h"
#include "shoal/engine/plan.h"

namespace nb = nanobind;
using nb::literals::operator""_a;

namespace shoal::python {
namespace {

// The callback runs on the loading thread without the lock; an exception of it (Ctrl-C) ends the load. The engine may
// copy and drop the function whenever it likes, so that the reference to the Python object is counted apart.
std::function<void(double)> progress_callback(const nb::object& callback) {
  if (callback.is_none()) {
    return {};
  }
  const std::shared_ptr<nb::object> shared(new nb::object(callback), [](nb::object* object) {
    const nb::gil_scoped_acquire lock;
    delete object;
  });
  return [shared](double fraction) {
    const nb::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() != 0) {
      throw nb::python_error();
    }
    (*shared)(fraction);
  };
}

std::unique_ptr<Engine> make_engine(const std::string& model, const std::string& device, const std::string& kv_dtype,
                                    int64_t max_context, int64_t max_batch_tokens, int64_t max_seqs, int64_t page_size,
                                    int64_t num_pages, int64_t kv_bytes, int threads, bool exact, bool prefix_cache,
                                    const nb::object& load_progress) {
  EngineOptions options;
  options.model = model;
  options.device = device;
  options.kv_dtype = kv_dtype;
  options.max_context = max_context;
  options.max_batch_tokens = max_batch_tokens;
  options.max_seqs = max_seqs;
  options.page_size = page_size;
  options.num_pages = num_pages;
  options.kv_bytes = kv_bytes;
  options.threads = threads;
  options.exact = exact;
  options.prefix_cache = prefix_cache;
  options.load_progress = progress_callback(load_progress);
  const nb::gil_scoped_release unlock;
  return std::make_unique<Engine>(options);
}

// None when the context is too long; the caller knows the numbers and says so.
nb::object submit(Engine& engine, std::vector<int32_t> prompt, const SamplingOptions& sampling, int64_t max_tokens,
                  std::vector<int32_t> stop_ids, uint64_t salt, int64_t max_queued_tokens) {
  Request request;
  request.prompt = std::move(prompt);
  request.sampling = sampling;
  request.max_tokens = max_tokens;
  request.stop_ids = std::move(stop_ids);
  request.salt = salt;
  request.max_queued_tokens = max_queued_tokens;
  const auto result = [&] {
    const nb::gil_scoped_release unlock;
    return engine.submit(std::move(request));
  }();
  if (result.ok()) {
    return nb::int_(result.value());
  }
  if (result.reason() == SubmitFailure::kStopped) {
    fail(ErrorCode::kInternal, "the engine has stopped");
  }
  return nb::none();
}

RequestUpdate wait(Engine& engine, RequestId id, int64_t timeout_ms) {
  const nb::gil_scoped_release unlock;
  return engine.wait(id, std::chrono::milliseconds(timeout_ms));
}

nb::object logits(Engine& engine, const std::vector<int32_t>& tokens) {
  auto values = std::make_unique<std::vector<float>>();
  {
    const nb::gil_scoped_release unlock;
    *values = engine.logits(tokens);
  }
  const size_t rows = tokens.size();
  const size_t columns = rows == 0 ? 0 : values->size() / rows;
  float* const data = values->data();
  const nb::capsule owner(values.release(),
                          [](void* pointer) noexcept { delete static_cast<std::vector<float>*>(pointer); });
  return nb::cast(nb::ndarray<nb::numpy, float, nb::ndim<2>>(data, {rows, columns}, owner));
}

nb::list top_list(const Sampled& sampled) {
  nb::list list;
  for (const TokenLogprob& entry : sampled.top) {
    list.append(nb::make_tuple(entry.id, entry.logprob));
  }
  return list;
}

void bind_values(nb::module_& module) {
  nb::class_<SamplingOptions>(module, "SamplingOptions")
      .def(nb::init<>())
      .def_rw("temperature", &SamplingOptions::temperature)
      .def_rw("top_k", &SamplingOptions::top_k)
      .def_rw("top_p", &SamplingOptions::top_p)
      .def_rw("min_p", &SamplingOptions::min_p)
      .def_rw("repetition_penalty", &SamplingOptions::repetition_penalty)
      .def_rw("presence_penalty", &SamplingOptions::presence_penalty)
      .def_rw("frequency_penalty", &SamplingOptions::frequency_penalty)
      .def_rw("logit_bias", &SamplingOptions::logit_bias)
      .def_rw("seed", &SamplingOptions::seed)
      .def_rw("num_logprobs", &SamplingOptions::num_logprobs);

  nb::class_<Sampled>(module, "Sampled")
      .def_ro("id", &Sampled::id)
      .def_ro("logprob", &Sampled::logprob)
      .def_prop_ro("top", &top_list);

  nb::class_<RequestUpdate>(module, "RequestUpdate")
      .def_ro("tokens", &RequestUpdate::tokens)
      .def_ro("num_prompt_done", &RequestUpdate::num_prompt_done)
      .def_ro("num_prefix_hit", &RequestUpdate::num_prefix_hit)
      .def_prop_ro("finish_reason",
                   [](const RequestUpdate& update) -> nb::object {
                     if (update.finish == FinishReason::kNone) {
                       return nb::none();
                     }
                     return to_str(to_string(update.finish));
                   })
      .def_prop_ro("error", [](const RequestUpdate& update) { return to_str(update.error); });
}

nb::dict info_dict(const Engine& engine) {
  const EngineInfo& info = engine.info();
  nb::dict dict;
  dict["architecture"] = to_str(info.architecture);
  dict["model_name"] = to_str(info.model_name);
  dict["device"] = to_str(info.device);
  dict["isa"] = to_str(info.isa);
  dict["kv_dtype"] = to_str(info.kv_dtype);
  dict["threads"] = info.threads;
  dict["vocab_size"] = info.vocab_size;
  dict["max_context"] = info.max_context;
  dict["page_size"] = info.page_size;
  dict["num_pages"] = info.num_pages;
  dict["num_parameters"] = info.num_parameters;
  dict["weight_bytes"] = info.weight_bytes;
  dict["kv_bytes"] = info.kv_bytes;
  dict["state_bytes"] = info.state_bytes;
  dict["prefix_cache"] = info.prefix_cache;
  return dict;
}

nb::dict stats_dict(const Engine& engine) {
  const EngineStats stats = [&] {
    const nb::gil_scoped_release unlock;
    return engine.stats();
  }();
  nb::dict dict;
  dict["num_waiting"] = stats.num_waiting;
  dict["num_running"] = stats.num_running;
  dict["num_paused"] = stats.num_paused;
  dict["num_pages"] = stats.num_pages;
  dict["num_free_pages"] = stats.num_free_pages;
  dict["num_cached_pages"] = stats.num_cached_pages;
  dict["num_preemptions"] = stats.num_preemptions;
  dict["num_steps"] = stats.num_steps;
  dict["num_tokens"] = stats.num_tokens;
  return dict;
}

nb::dict plan(const std::string& model, const std::vector<int64_t>& contexts, const std::string& kv_dtype, bool exact,
              int threads, int64_t max_batch_tokens, int64_t page_size) {
  EngineOptions options;
  options.model = model;
  options.kv_dtype = kv_dtype;
  options.exact = exact;
  options.threads = threads;
  options.max_batch_tokens = max_batch_tokens;
  options.page_size = page_size;
  const ModelPlan plan = [&] {
    const nb::gil_scoped_release unlock;
    return plan_model(options, contexts);
  }();
  nb::list layers;
  for (const std::string& layer : plan.model.layers) {
    layers.append(to_str(layer));
  }
  nb::list weights;
  for (const WeightGroup& group : plan.model.weights) {
    nb::dict dict;
    dict["format"] = to_str(group.format);
    dict["layout"] = to_str(group.layout);
    dict["variant"] = to_str(group.variant);
    dict["count"] = group.count;
    dict["bytes"] = group.num_bytes;
    weights.append(dict);
  }
  nb::list memory;
  for (const MemoryNeed& need : plan.needs) {
    nb::dict dict;
    dict["context"] = need.context;
    dict["weights"] = need.weight_bytes;
    dict["kv"] = need.kv_bytes;
    dict["states"] = need.state_bytes;
    dict["workspace"] = need.workspace_bytes;
    dict["total"] = need.total();
    memory.append(dict);
  }
  nb::dict kv;
  for (const auto& [name, num_bytes] : plan.kv_token_bytes) {
    kv[to_str(name)] = num_bytes;
  }
  nb::dict result;
  result["parameters"] = plan.model.num_parameters;
  result["max_context"] = plan.model.max_positions;
  result["weight_bytes"] = plan.model.weight_bytes;
  result["kv_dtype"] = to_str(plan.kv_dtype);
  result["layers"] = layers;
  result["weights"] = weights;
  result["kv_token_bytes"] = kv;
  result["state_bytes"] = plan.state_slot_bytes;
  result["memory"] = memory;
  return result;
}

// Joining the loop can take a step's time, so the engine dies without the lock held.
struct ReleaseLock {
  void operator()(Engine* engine) const {
    const nb::gil_scoped_release unlock;
    delete engine;
  }
};

// What Python holds. `close` ends the engine early; using it afterwards is kInvalidArgument.
class EngineHandle {
 public:
  explicit EngineHandle(std::unique_ptr<Engine> engine) : engine_(engine.release(), ReleaseLock{}) {}
  // A copy keeps the engine alive while a call of another thread is inside it.
  std::shared_ptr<Engine> get() const {
    require(engine_ != nullptr, "the engine is closed");
    return engine_;
  }
  void close() { engine_.reset(); }

 private:
  std::shared_ptr<Engine> engine_;
};

}  // namespace

void bind_engine(nb::module_& module) {
  bind_values(module);
  module.def("plan_model", &plan, "model"_a, "contexts"_a, nb::kw_only(), "kv_dtype"_a = "auto", "exact"_a = false,
             "threads"_a = 0, "max_batch_tokens"_a = EngineOptions{}.max_batch_tokens,
             "page_size"_a = EngineOptions{}.page_size);
  nb::class_<EngineHandle>(module, "Engine")
      .def(
          "__init__",
          [](EngineHandle* self, const std::string& model, const std::string& device, const std::string& kv_dtype,
             int64_t max_context, int64_t max_batch_tokens, int64_t max_seqs, int64_t page_size, int64_t num_pages,
             int64_t kv_bytes, int threads, bool exact, bool prefix_cache, const nb::object& load_progress) {
            new (self)
                EngineHandle(make_engine(model, device, kv_dtype, max_context, max_batch_tokens, max_seqs, page_size,
                                         num_pages, kv_bytes, threads, exact, prefix_cache, load_progress));
          },
          "model"_a, nb::kw_only(), "device"_a = "auto", "kv_dtype"_a = "auto", "max_context"_a = 0,
          "max_batch_tokens"_a = EngineOptions{}.max_batch_tokens, "max_seqs"_a = EngineOptions{}.max_seqs,
          "page_size"_a = EngineOptions{}.page_size, "num_pages"_a = 0, "kv_bytes"_a = 0, "threads"_a = 0,
          "exact"_a = false, "prefix_cache"_a = true, "load_progress"_a = nb::none())
      .def("info", [](const EngineHandle& self) { return info_dict(*self.get()); })
      .def("stats", [](const EngineHandle& self) { return stats_dict(*self.get()); })
      .def(
          "submit",
          [](const EngineHandle& self, std::vector<int32_t> prompt, const SamplingOptions& sampling, int64_t max_tokens,
             std::vector<int32_t> stop_ids, uint64_t salt, int64_t max_queued_tokens) {
            return submit(*self.get(), std::move(prompt), sampling, max_tokens, std::move(stop_ids), salt,
                          max_queued_tokens);
          },
          "prompt"_a, "sampling"_a, nb::kw_only(), "max_tokens"_a, "stop_ids"_a = std::vector<int32_t>{}, "salt"_a = 0,
          "max_queued_tokens"_a = 0)
      .def(
          "wait",
          [](const EngineHandle& self, RequestId id, int64_t timeout_ms) { return wait(*self.get(), id, timeout_ms); },
          "id"_a, "timeout_ms"_a)
      .def(
          "cancel",
          [](const EngineHandle& self, RequestId id) {
            const std::shared_ptr<Engine> engine = self.get();
            const nb::gil_scoped_release unlock;
            engine->cancel(id);
          },
          "id"_a)
      .def(
          "logits",
          [](const EngineHandle& self, const std::vector<int32_t>& tokens) { return logits(*self.get(), tokens); },
          "tokens"_a)
      .def("close", &EngineHandle::close);
}

}  // namespace shoal::python
