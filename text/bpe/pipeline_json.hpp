// SPDX-License-Identifier: MIT
#pragma once

// The parts of tokenizer.json around its model. They throw Error{Unsupported} with the name of what
// is not known, and Error{Corrupt}.

#include "bpe_model.hpp"

#include <nlohmann/json.hpp>

namespace bellows::text {

/// Whether texts are brought into NFC.
bool read_normalizer(const nlohmann::json& json);
void read_pre_tokenizer(const nlohmann::json& json, PreTokenizer& pieces);
/// What stands around a text.
void read_post_processor(const nlohmann::json& json, BpeModel& model);
void check_decoder(const nlohmann::json& json);

} // namespace bellows::text
