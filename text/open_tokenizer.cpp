// SPDX-License-Identifier: MIT
// How tokenizers are made of files.
#include <bellows/text/tokenizer.hpp>

#include "bpe/tokenizer_json.hpp"
#include "tokenizer_files.hpp"
#include "tokenizer_impl.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>

#include <array>
#include <utility>

namespace bellows {

namespace fs = std::filesystem;

namespace {

using text::TokenizerFiles;

constexpr const char* kJson = "tokenizer.json";
constexpr const char* kTiktoken = "tiktoken.model";
constexpr const char* kPieces = "tokenizer.model";
/// Where the files do not say it. DeepSeek's has U+FF5C and U+2581.
constexpr std::array kUsualEnds = {"<\xef\xbd\x9c"
                                   "end\xe2\x96\x81of\xe2\x96\x81sentence\xef\xbd\x9c>",
                                   "<|endoftext|>",
                                   "<|end_of_text|>",
                                   "[EOS]",
                                   "</s>",
                                   "<|im_end|>"};

/// What a single file is.
const char* kind_of(std::string_view content) {
    const std::size_t first = content.find_first_not_of(" \t\r\n");
    return first != std::string_view::npos && content[first] == '{' ? kJson : kPieces;
}

TokenizerFiles files_of(const std::string& model) {
    return text::is_packed(model) ? text::unpack_files(model)
                                  : TokenizerFiles{{kind_of(model), model}};
}

} // namespace

Tokenizer Tokenizer::sentencepiece(const fs::path& model) {
    return from_model(read_file(model, text::kLargestTokenizerFile), model.string());
}

Tokenizer Tokenizer::from_folder(const fs::path& folder) {
    return from_model(text::pack_files(text::read_tokenizer_files(folder)), folder.string());
}

Tokenizer Tokenizer::from_name(const std::string& name) {
    if (name == "bytes") {
        return bytes();
    }
    const fs::path path(name);
    std::error_code error;
    if (fs::is_directory(path, error)) {
        return from_folder(path);
    }
    if (path.filename() == kJson || path.filename() == kTiktoken) {
        const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
        if (!fs::exists(path, error)) {
            throw Error(ErrorCode::Io, "there is no tokenizer " + in_quotes(name));
        }
        return from_folder(folder);
    }
    return sentencepiece(path);
}

Tokenizer Tokenizer::from_model(std::string model, const std::string& name) {
    auto impl = std::make_unique<Impl>();
    impl->name = name;
    impl->model = std::move(model);
    try {
        impl->read();
    } catch (const Error& error) {
        throw Error(error.code(),
                    "the tokenizer " + in_quotes(name) + " cannot be used: " + error.message());
    }
    return Tokenizer(std::move(impl));
}

std::map<std::string, std::string> Tokenizer::files() const {
    return impl_->model.empty() ? TokenizerFiles() : files_of(impl_->model);
}

void Tokenizer::Impl::read() {
    const TokenizerFiles files = files_of(model);
    const auto content = [&](const char* file) {
        const auto found = files.find(file);
        return found == files.end() ? std::string() : found->second;
    };
    if (files.contains(kJson)) {
        bpe = text::read_tokenizer_json(content(kJson));
    } else if (files.contains(kTiktoken)) {
        bpe = text::read_tiktoken(content(kTiktoken), content("tokenizer_config.json"));
    } else if (files.contains(kPieces)) {
        read_pieces(content(kPieces));
    } else {
        throw Error(ErrorCode::Corrupt, "its files have no tokenizer among them");
    }
    if (bpe) {
        vocabulary = bpe->tokens.size();
    }
    read_special_tokens(files);
}

void Tokenizer::Impl::read_pieces(const std::string& content) {
    try {
        pieces = std::make_unique<text::SentencePieces>(content);
    } catch (const std::exception& error) { // the library throws, too
        throw Error(ErrorCode::Corrupt, std::string("it is no sound sentencepiece model: ") +
                                            error.what() +
                                            "; give a .model file, a tokenizer.json or \"bytes\"");
    }
    vocabulary = pieces->vocabulary();
    for (std::uint32_t id = 0; id < vocabulary; ++id) {
        if (pieces->is_control(id)) {
            text::AddedToken token;
            token.id = id;
            token.content = pieces->piece(id);
            token.special = token.marker = true;
            control_pieces.add(token);
        }
    }
}

void Tokenizer::Impl::read_special_tokens(const TokenizerFiles& files) {
    const text::SpecialTokens special = text::read_special_tokens(
        files, vocabulary, [this](std::string_view token) { return id_of(token); });
    bos = special.bos;
    pad = special.pad;
    chat_template = special.chat_template;
    std::optional<std::uint32_t> end = special.eos;
    if (pieces) {
        bos = bos ? bos : pieces->bos();
        pad = pad ? pad : pieces->pad();
        end = end ? end : pieces->end_of_document();
    }
    for (const char* usual : kUsualEnds) {
        end = end ? end : id_of(usual);
    }
    if (!end) {
        throw Error(ErrorCode::Unsupported,
                    "nothing says which token ends a text; put a tokenizer_config.json with "
                    "\"eos_token\" beside it");
    }
    end_of_document = *end;
    end_tokens = special.end_tokens.empty() ? std::vector{*end} : special.end_tokens;
    if (bpe) {
        before_text = bpe->before_text;
        behind_text = bpe->behind_text;
    }
    if (before_text.empty() && bos && special.add_bos.value_or(pieces != nullptr)) {
        before_text.push_back(*bos);
    }
    if (behind_text.empty() && special.add_eos.value_or(false)) {
        behind_text.push_back(*end);
    }
}

} // namespace bellows
