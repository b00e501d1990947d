#include "shoal/model/registry.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include "shoal/base/text.h"
#include "shoal/model/synthetic.h"

namespace shoal {
namespace {

std::array<const Architecture*, 13> all_architectures() {
  return {&kDeepseekV3, &kGemma3,  &kGlm4Moe, &kGptOss, &kGranite,  &kLfm2,     &kLlama,
          &kMinimaxM3,  &kMixtral, &kOlmoe,   &kQwen,   &kQwen3Moe, &kQwen3Next};
}

bool contains(std::span<const std::string_view> names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

[[noreturn]] void unknown(std::string_view name) {
  std::string known;
  for (const std::string& architecture : registered_architectures()) {
    known += (known.empty() ? "" : ", ") + architecture;
  }
  fail(ErrorCode::kUnsupported, "architecture \"", printable(name), "\" is not supported (known: ", known, ")");
}

}  // namespace

std::vector<std::string> registered_architectures() {
  std::vector<std::string> names;
  for (const Architecture* architecture : all_architectures()) {
    names.insert(names.end(), architecture->gguf_names.begin(), architecture->gguf_names.end());
    names.insert(names.end(), architecture->hf_names.begin(), architecture->hf_names.end());
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

std::unique_ptr<Model> load_model(const std::filesystem::path& path, const LoadOptions& options,
                                  const OpContext& context) {
  const std::string path_text = path.string();
  if (path_text.starts_with(kSyntheticPrefix)) {
    return make_synthetic(std::string_view(path_text).substr(kSyntheticPrefix.size()), options, context);
  }
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    auto folder = std::make_unique<io::ModelFolder>(path);
    const Json* type = folder->config().find("model_type");
    if (type == nullptr) {
      fail(ErrorCode::kModelFormat, "config.json: \"model_type\" is missing");
    }
    const std::string name = type->as_string("config.json: \"model_type\"");
    for (const Architecture* architecture : all_architectures()) {
      if (contains(architecture->hf_names, name)) {
        return architecture->from_hf(std::move(folder), options, context);
      }
    }
    unknown(name);
  }
  auto file = std::make_unique<io::GgufFile>(path);
  const std::string name = file->get_string("general.architecture");
  for (const Architecture* architecture : all_architectures()) {
    if (contains(architecture->gguf_names, name)) {
      return architecture->from_gguf(std::move(file), options, context);
    }
  }
  unknown(name);
}

}  // namespace shoal
