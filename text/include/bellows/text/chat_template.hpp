// SPDX-License-Identifier: MIT
#pragma once

// A conversation as token ids, by the chat template of its model: a Jinja template, of which the
// subset that such templates use is interpreted, with bounds on steps, depth and output. What
// stands in messages stays ordinary text: the template alone can write markers. Immutable; any
// thread.

#include <bellows/text/tokenizer.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace bellows {

struct ChatMessage {
    std::string role; ///< "system", "user", "assistant" or what else the template knows
    std::string content;
};

struct ChatOptions {
    bool generation_prompt = true; ///< end with the beginning of the model's answer
};

class ChatTemplate {
public:
    /// The template that came with the tokenizer, else a built-in one, which is chosen by the
    /// tokenizer's markers: DeepSeek-V2, DeepSeek-V3, Llama 3, ChatML (Qwen), Moonlight. The
    /// tokenizer must outlive it. Throws Error{Unsupported} if there is neither, or for what the
    /// interpreter does not know, with its line.
    explicit ChatTemplate(const Tokenizer& tokenizer);
    /// A template's text.
    ChatTemplate(const Tokenizer& tokenizer, const std::string& source);
    ChatTemplate(ChatTemplate&&) noexcept;
    ChatTemplate& operator=(ChatTemplate&&) noexcept;
    ~ChatTemplate();

    /// "DeepSeek-V3", say; "": the tokenizer's own, or a given one.
    const std::string& built_in() const noexcept { return built_in_; }

    /// Throws Error{InvalidArgument} with what the template says if it refuses the messages (an
    /// unknown role, say), Error{Unsupported} for what the interpreter does not know and for a
    /// template that takes too much.
    std::vector<std::uint32_t> encode(std::span<const ChatMessage> messages,
                                      const ChatOptions& options = {}) const;
    /// The text of encode()'s ids.
    std::string render(std::span<const ChatMessage> messages,
                       const ChatOptions& options = {}) const;

private:
    struct Program;
    const Tokenizer* tokenizer_;
    std::string built_in_;
    std::unique_ptr<const Program> program_;
};

} // namespace bellows
