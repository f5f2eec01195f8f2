// SPDX-License-Identifier: MIT
#include <bellows/text/tokenizer.hpp>

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>

#include <sentencepiece_processor.h>

#include <utility>

namespace bellows {

struct Tokenizer::Impl {
    std::string name = "bytes";
    std::uint32_t vocabulary = 256;
    std::uint32_t end_of_document = 0;
    std::unique_ptr<sentencepiece::SentencePieceProcessor> pieces; // none: bytes
};

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {
}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::bytes() {
    return Tokenizer(std::make_unique<Impl>());
}

Tokenizer Tokenizer::sentencepiece(const std::filesystem::path& model) {
    constexpr std::uint64_t kLargestModel = std::uint64_t{256} << 20;
    const std::string content = read_file(model, kLargestModel);
    auto impl = std::make_unique<Impl>();
    impl->name = model.string();
    impl->pieces = std::make_unique<sentencepiece::SentencePieceProcessor>();
    const auto status = impl->pieces->LoadFromSerializedProto(content);
    if (!status.ok() || impl->pieces->GetPieceSize() <= 0) {
        throw Error(ErrorCode::Corrupt,
                    "tokenizer " + in_quotes(impl->name) +
                        " is not a sentencepiece model; give a .model file or \"bytes\"");
    }
    impl->vocabulary = static_cast<std::uint32_t>(impl->pieces->GetPieceSize());
    // A model without an end-of-sentence piece separates documents by whatever it has.
    for (const int id : {impl->pieces->eos_id(), impl->pieces->bos_id(), impl->pieces->unk_id()}) {
        if (id >= 0) {
            impl->end_of_document = static_cast<std::uint32_t>(id);
            break;
        }
    }
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

std::vector<std::uint32_t> Tokenizer::encode(std::string_view text) const {
    std::vector<std::uint32_t> ids;
    if (!impl_->pieces) {
        ids.reserve(text.size());
        for (const char c : text) {
            ids.push_back(static_cast<unsigned char>(c));
        }
        return ids;
    }
    std::vector<int> pieces;
    const auto status = impl_->pieces->Encode({text.data(), text.size()}, &pieces);
    if (!status.ok()) {
        throw Error(ErrorCode::InvalidArgument,
                    "tokenizer " + in_quotes(impl_->name) + " cannot encode the text");
    }
    ids.assign(pieces.begin(), pieces.end());
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
    if (impl_->pieces && !impl_->pieces->Decode(pieces, &text).ok()) {
        throw Error(ErrorCode::InvalidArgument,
                    "tokenizer " + in_quotes(impl_->name) + " cannot decode the tokens");
    }
    return text;
}

} // namespace bellows
