// SPDX-License-Identifier: MIT
#include <bellows/text/chat_template.hpp>

#include "bpe/utf8.hpp"
#include "chat/built_in_templates.hpp"
#include "chat/jinja.hpp"
#include "encoder.hpp"
#include "tokenizer_impl.hpp"

#include <bellows/base/error.hpp>

#include <utility>

namespace bellows {

using text::MarkedText;
using text::jinja::Value;

struct ChatTemplate::Program {
    explicit Program(std::string_view source) : parsed(source) {}
    text::jinja::Template parsed;

    MarkedText render(const Tokenizer::Impl& tokenizer, std::span<const ChatMessage> messages,
                      const ChatOptions& options) const;
};

namespace {

/// What the template gets from outside.
Value outside(std::string_view text) {
    return Value::text(MarkedText::from_outside(text::repaired(text)));
}

} // namespace

ChatTemplate::ChatTemplate(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {
    if (!tokenizer.chat_template().empty()) {
        program_ = std::make_unique<Program>(tokenizer.chat_template());
    } else if (const auto known = text::built_in_template(tokenizer)) {
        built_in_ = known->name;
        program_ = std::make_unique<Program>(known->source);
    } else {
        throw Error(ErrorCode::Unsupported,
                    "the tokenizer " + in_quotes(tokenizer.name()) +
                        " has no chat template; put a chat_template.jinja beside it");
    }
}

ChatTemplate::ChatTemplate(const Tokenizer& tokenizer, const std::string& source)
    : tokenizer_(&tokenizer), program_(std::make_unique<Program>(source)) {
}

ChatTemplate::ChatTemplate(ChatTemplate&&) noexcept = default;
ChatTemplate& ChatTemplate::operator=(ChatTemplate&&) noexcept = default;
ChatTemplate::~ChatTemplate() = default;

MarkedText ChatTemplate::Program::render(const Tokenizer::Impl& tokenizer,
                                         std::span<const ChatMessage> messages,
                                         const ChatOptions& options) const {
    text::jinja::List list;
    for (const ChatMessage& message : messages) {
        auto entry = std::make_shared<text::jinja::Dict>();
        entry->set("role", outside(message.role));
        entry->set("content", outside(message.content));
        list.push_back(Value(std::move(entry)));
    }
    const auto token = [&](std::optional<std::uint32_t> id) {
        return id ? Value::text(MarkedText::of_template(tokenizer.token_text(*id))) : Value();
    };
    const Value none{text::jinja::None()};
    return parsed.render({{"messages", Value::list(std::move(list))},
                          {"add_generation_prompt", Value(options.generation_prompt)},
                          {"bos_token", token(tokenizer.bos)},
                          {"eos_token", token(tokenizer.end_of_document)},
                          {"pad_token", token(tokenizer.pad)},
                          {"tools", none},
                          {"documents", none}});
}

std::vector<std::uint32_t> ChatTemplate::encode(std::span<const ChatMessage> messages,
                                                const ChatOptions& options) const {
    const MarkedText text = program_->render(*tokenizer_->impl_, messages, options);
    std::vector<std::uint32_t> ids;
    text::TextEncoder(*tokenizer_)
        .encode_marked(text.text, text::Recognise::NotMarkers, text.own, ids);
    return ids;
}

std::string ChatTemplate::render(std::span<const ChatMessage> messages,
                                 const ChatOptions& options) const {
    return program_->render(*tokenizer_->impl_, messages, options).text;
}

} // namespace bellows
