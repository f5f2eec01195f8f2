// SPDX-License-Identifier: MIT
#pragma once

// Texts that a model writes, as the command shows them: one or many at once, as they grow, and how
// fast. One thread.

#include "app/commands.hpp"

#include <bellows/serve/engine.hpp>
#include <bellows/serve/stop_strings.hpp>
#include <bellows/text/tokenizer.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace bellows {

/// This is what the model wrote after one prompt.
struct Written {
    std::string text;
    std::vector<std::uint32_t> tokens;
    FinishReason reason = FinishReason::None;
    bool degraded = false; ///< the rank of experts that it needed was lost
    std::uint64_t prompt_tokens = 0;
    std::uint64_t cached_tokens = 0;         ///< of the prompt that were computed before
    std::uint64_t drafted = 0, accepted = 0; ///< drafts that were checked, and of them accepted
};

/// These are the times of all texts together. The first token of an answer counts as the prompt's.
struct WritingTimes {
    std::uint64_t prompt_tokens = 0; ///< that were computed
    std::uint64_t tokens = 0;
    double prompt_seconds = 0; ///< of steps that computed tokens of prompts
    double seconds = 0;        ///< of the others
    std::uint64_t drafted = 0, accepted = 0;
};

/// "prompt: 12 tokens, 340.1 tokens/s; text: 200 tokens, 92.3 tokens/s", with
/// "; 110 drafts, 81.8 % accepted" behind it where there were any.
std::string format_times(const WritingTimes& times);

class Writer {
public:
    /// on_text: the next piece of the text of a prompt. stop: asked after every step, ends all.
    using OnText = std::function<void(std::size_t prompt, const std::string& piece)>;
    using Stop = std::function<bool()>;

    /// All must outlive it.
    Writer(Engine& engine, const Tokenizer& tokenizer) : engine_(engine), tokenizer_(tokenizer) {}

    /// Texts longer than the engine's context go on with the last half of it. Among ranks it is
    /// collective, and returns when all texts of all ranks have ended. Throws what the engine
    /// throws.
    std::vector<Written> write(std::span<const std::vector<std::uint32_t>> prompts,
                               const TextOptions& options, const OnText& on_text = {},
                               const Stop& stop = {});
    const WritingTimes& times() const noexcept { return times_; }

private:
    struct Text;
    void submit(Text& text, const TextOptions& options);
    void take(Text& text, const TextOptions& options, std::size_t index, const OnText& on_text);

    Engine& engine_;
    const Tokenizer& tokenizer_;
    WritingTimes times_;
};

/// The tokens of a prompt, or of a user's message by the tokenizer's chat template.
std::vector<std::uint32_t> prompt_tokens(const Tokenizer& tokenizer, const std::string& prompt,
                                         const GenerateOptions& options);
/// The tokenizer that the options name, checked against the model.
Tokenizer tokenizer_of(const GenerateOptions& options);
/// The model of the options; progress on standard error. context: tokens that a text will have;
/// world: of the ranks that share the experts.
std::unique_ptr<Engine> open_engine(const GenerateOptions& options, const Tokenizer& tokenizer,
                                    std::uint64_t context, std::uint64_t texts,
                                    World* world = nullptr);

} // namespace bellows
