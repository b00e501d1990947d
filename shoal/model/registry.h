// The list of architectures. Each family's file defines one entry; registry.cpp names them all.
#pragma once

#include <memory>
#include <span>
#include <string_view>

#include "shoal/io/gguf.h"
#include "shoal/io/safetensors.h"
#include "shoal/model/model.h"

namespace shoal {

struct Architecture {
  std::span<const std::string_view> gguf_names;  // general.architecture
  std::span<const std::string_view> hf_names;  // config.json model_type, also of a vision-language model's whole config
  // nullptr where there are no names of that kind.
  std::unique_ptr<Model> (*from_gguf)(std::unique_ptr<io::GgufFile>, const LoadOptions&, const OpContext&);
  std::unique_ptr<Model> (*from_hf)(std::unique_ptr<io::ModelFolder>, const LoadOptions&, const OpContext&);
};

extern const Architecture kLlama;  // also Mistral and SmolLM
extern const Architecture kQwen;   // qwen2, qwen3
extern const Architecture kGemma3;
extern const Architecture kDeepseekV3;
extern const Architecture kGlm4Moe;
extern const Architecture kGptOss;
extern const Architecture kLfm2;  // also lfm2_moe
extern const Architecture kMinimaxM3;
extern const Architecture kMixtral;  // also MiniMax-M2
extern const Architecture kGranite;
extern const Architecture kOlmoe;
extern const Architecture kQwen3Moe;
extern const Architecture kQwen3Next;

}  // namespace shoal
