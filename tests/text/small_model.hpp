// SPDX-License-Identifier: MIT
#pragma once

// A sentencepiece model of some 60 pieces, trained in a moment.

#include "support/temporary_folder.hpp"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace bellows {

/// Its path. flags: of the trainer, e.g. "--model_type=bpe".
inline std::string small_model(const TemporaryFolder& folder, const std::string& flags) {
    std::string text;
    for (int i = 0; i < 400; ++i) {
        text += "the forge of number " + std::to_string(i * 37 % 101) + " breathes slowly\n";
    }
    const std::string input = folder.write("train-model.txt", text).string();
    const std::string prefix = (folder.path() / "pieces").string();
    const bool bytes = flags.find("byte_fallback") != std::string::npos;
    const auto status = sentencepiece::SentencePieceTrainer::Train(
        "--input=" + input + " --model_prefix=" + prefix + " --vocab_size=" +
        (bytes ? "310" : "60") + " --minloglevel=2 --hard_vocab_limit=false " + flags);
    if (!status.ok()) {
        throw std::runtime_error(status.ToString());
    }
    return prefix + ".model";
}

/// The tokens that the library gives a whole text.
inline std::vector<std::uint32_t> encoded_at_once(const std::string& model,
                                                  const std::string& text) {
    sentencepiece::SentencePieceProcessor pieces;
    std::vector<int> ids;
    if (!pieces.Load(model).ok() || !pieces.Encode(text, &ids).ok()) {
        throw std::runtime_error("the library cannot encode with " + model);
    }
    return {ids.begin(), ids.end()};
}

} // namespace bellows
