// SPDX-License-Identifier: MIT
#include <bellows/text/tokenizer.hpp>

#include "encoder.hpp"
#include "fingerprint.hpp"
#include "tokenizer_impl.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>

#include <utility>

namespace bellows {

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {
}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::bytes() {
    return Tokenizer(std::make_unique<Impl>());
}

Tokenizer Tokenizer::sentencepiece(const std::filesystem::path& model) {
    constexpr std::uint64_t kLargestModel = std::uint64_t{64} << 20;
    return from_model(read_file(model, kLargestModel), model.string());
}

Tokenizer Tokenizer::from_model(std::string model, const std::string& name) {
    auto impl = std::make_unique<Impl>();
    impl->name = name;
    impl->model = std::move(model);
    try {
        impl->pieces = std::make_unique<text::SentencePieces>(impl->model);
    } catch (const std::exception& error) { // the library throws, too
        throw Error(ErrorCode::Corrupt, "tokenizer " + in_quotes(name) +
                                            " is no sound sentencepiece model: " + error.what() +
                                            "; give a .model file or \"bytes\"");
    }
    impl->vocabulary = impl->pieces->vocabulary();
    impl->end_of_document = impl->pieces->end_of_document();
    return Tokenizer(std::move(impl));
}

Tokenizer Tokenizer::from_name(const std::string& name) {
    return name == "bytes" ? bytes() : sentencepiece(name);
}

std::uint32_t Tokenizer::vocabulary() const noexcept {
    return impl_->vocabulary;
}

std::uint32_t Tokenizer::end_of_document() const noexcept {
    return impl_->end_of_document;
}

const std::string& Tokenizer::name() const noexcept {
    return impl_->name;
}

const std::string& Tokenizer::model() const noexcept {
    return impl_->model;
}

std::uint64_t Tokenizer::fingerprint() const noexcept {
    constexpr std::uint64_t kCuts = 1; // changes with the places where segments.hpp cuts
    return text::Fingerprint().add(kCuts).add(std::string_view(impl_->model)).value();
}

std::vector<std::uint32_t> Tokenizer::encode(std::string_view text) const {
    std::vector<std::uint32_t> ids;
    text::TextEncoder(*this).encode(text, -1, ids);
    return ids;
}

std::string Tokenizer::decode(std::span<const std::uint32_t> ids) const {
    std::string text;
    std::vector<int> pieces;
    for (const std::uint32_t id : ids) {
        if (id >= impl_->vocabulary) {
            throw Error(ErrorCode::InvalidArgument, "token " + std::to_string(id) +
                                                        " is outside the vocabulary of " +
                                                        std::to_string(impl_->vocabulary));
        }
        if (id == impl_->end_of_document) {
            continue;
        }
        if (impl_->pieces) {
            pieces.push_back(static_cast<int>(id));
        } else {
            text.push_back(static_cast<char>(id));
        }
    }
    return impl_->pieces ? impl_->pieces->decode(pieces) : text;
}

} // namespace bellows
