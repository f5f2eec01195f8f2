// SPDX-License-Identifier: MIT
#include <bellows/text/corpus.hpp>

#include "encoder.hpp"
#include "fingerprint.hpp"
#include "token_file.hpp"
#include "tokenise.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/memory_sizes.hpp>

#include <map>
#include <utility>

namespace bellows {

namespace fs = std::filesystem;

std::uint64_t fingerprint(const TextFiles& text, const Tokenizer& tokenizer) {
    text::Fingerprint sum;
    sum.add(tokenizer.fingerprint()).add(std::uint64_t{text.files.size()});
    for (const TextFile& file : text.files) {
        sum.add(std::string_view(file.path.native()))
            .add(file.bytes)
            .add(static_cast<std::uint64_t>(file.modified));
    }
    return sum.value();
}

Corpus::Corpus(std::uint32_t vocabulary)
    : token_bytes_(text::token_bytes(vocabulary)), vocabulary_(vocabulary) {
}

Corpus Corpus::from_text(std::string_view text, const Tokenizer& tokenizer) {
    Corpus corpus(tokenizer.vocabulary());
    std::vector<std::uint32_t> ids = tokenizer.encode(text);
    ids.push_back(tokenizer.end_of_document());
    text::pack_tokens(ids, corpus.token_bytes_, corpus.memory_);
    corpus.num_tokens_ = ids.size();
    corpus.num_text_bytes_ = text.size();
    corpus.num_documents_ = 1;
    return corpus;
}

Corpus Corpus::read(std::span<const fs::path> paths, const Tokenizer& tokenizer) {
    return read(find_text(paths), tokenizer);
}

Corpus Corpus::read(const TextFiles& text, const Tokenizer& tokenizer) {
    Corpus corpus(tokenizer.vocabulary());
    const text::Tokenised done =
        text::tokenise(text, tokenizer, {}, [&](std::span<const std::uint8_t> tokens) {
            corpus.memory_.insert(corpus.memory_.end(), tokens.begin(), tokens.end());
        });
    corpus.num_tokens_ = done.num_tokens;
    corpus.num_text_bytes_ = done.num_text_bytes;
    corpus.num_documents_ = done.num_documents;
    corpus.content_ = done.content;
    corpus.skip_binary(text, done.binary);
    return corpus;
}

Corpus Corpus::make(const fs::path& file, const TextFiles& text, const Tokenizer& tokenizer,
                    const TokeniseOptions& options) {
    const std::uint64_t made_from = bellows::fingerprint(text, tokenizer);
    text::write_token_file(file, made_from, text, tokenizer, options);
    std::optional<Corpus> corpus = open(file, made_from, text);
    if (!corpus) {
        throw Error(ErrorCode::Corrupt,
                    in_quotes(file.string()) + " was changed as soon as it was written");
    }
    return std::move(*corpus);
}

std::optional<Corpus> Corpus::open(const fs::path& file, std::uint64_t fingerprint,
                                   const TextFiles& text) {
    std::optional<text::TokenFile> found = text::open_token_file(file);
    if (!found || found->header.fingerprint != fingerprint) {
        return std::nullopt;
    }
    Corpus corpus(static_cast<std::uint32_t>(found->header.vocabulary));
    corpus.num_tokens_ = found->header.num_tokens;
    corpus.num_text_bytes_ = found->header.num_text_bytes;
    corpus.num_documents_ = found->header.num_documents;
    corpus.content_ = found->header.content;
    corpus.skip_binary(text, found->binary());
    corpus.file_ = std::move(found->file);
    return corpus;
}

void Corpus::skip_binary(const TextFiles& text, std::span<const std::uint64_t> files) {
    skipped_ = text.skipped;
    for (const std::uint64_t file : files) {
        if (file < text.files.size()) {
            skipped_.push_back({text.files[file].path, "binary"});
        }
    }
}

const std::uint8_t* Corpus::tokens() const noexcept {
    return file_.bytes().empty() ? memory_.data()
                                 : reinterpret_cast<const std::uint8_t*>(file_.bytes().data()) +
                                       sizeof(text::TokenFileHeader);
}

double Corpus::bytes_per_token() const noexcept {
    return static_cast<double>(num_text_bytes_) / static_cast<double>(num_tokens());
}

void Corpus::copy(std::uint64_t first, std::span<std::uint32_t> out) const {
    if (first > num_tokens() || out.size() > num_tokens() - first) {
        throw Error(ErrorCode::InvalidArgument,
                    "tokens " + std::to_string(first) + " + " + std::to_string(out.size()) +
                        " leave a corpus of " + std::to_string(num_tokens()));
    }
    const std::uint8_t* at = tokens() + first * token_bytes_;
    for (std::uint32_t& token : out) {
        token = 0;
        for (std::uint32_t byte = 0; byte < token_bytes_; ++byte) {
            token |= static_cast<std::uint32_t>(*at++) << (8 * byte);
        }
        if (token >= vocabulary_) {
            throw Error(ErrorCode::Corrupt, "the file of tokens was damaged: it holds token " +
                                                std::to_string(token) + " of " +
                                                std::to_string(vocabulary_) +
                                                "; remove it, and it is made anew");
        }
    }
}

std::string describe(const Corpus& corpus) {
    std::map<std::string, std::uint64_t> skipped;
    for (const SkippedFile& file : corpus.skipped()) {
        ++skipped[file.reason];
    }
    std::string text = std::to_string(corpus.num_documents()) +
                       (corpus.num_documents() == 1 ? " document, " : " documents, ") +
                       format_bytes(corpus.num_text_bytes());
    std::string reasons;
    for (const auto& [reason, count] : skipped) {
        reasons += (reasons.empty() ? "" : ", ") + reason + " " + std::to_string(count);
    }
    return reasons.empty() ? text
                           : text + "; skipped " + std::to_string(corpus.skipped().size()) + " (" +
                                 reasons + ")";
}

DataSplit split_corpus(const Corpus& corpus, double holdout_fraction) {
    if (!(holdout_fraction >= 0 && holdout_fraction < 1)) {
        throw Error(ErrorCode::InvalidArgument, "the held-out fraction is " +
                                                    std::to_string(holdout_fraction) +
                                                    "; it must be at least 0 and below 1");
    }
    const std::uint64_t total = corpus.num_tokens();
    const auto held = static_cast<std::uint64_t>(static_cast<double>(total) * holdout_fraction);
    return {{0, total - held}, {total - held, held}};
}

} // namespace bellows
