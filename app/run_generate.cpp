// SPDX-License-Identifier: MIT
// The body of `bellows generate`: one rank, the whole model, each token computed from the last
// `seq` tokens of the text.
#include "app/model_folder.hpp"
#include "app/progress.hpp"
#include "app/run.hpp"

#include <bellows/base/printable.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/engine/device_choice.hpp>
#include <bellows/serve/sampling.hpp>
#include <bellows/text/chat_template.hpp>

#include <algorithm>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace bellows {

namespace {

std::vector<std::uint32_t> prompt_tokens(const Tokenizer& tokenizer,
                                         const GenerateOptions& options) {
    if (options.chat) {
        const ChatMessage message{"user", options.prompt};
        return ChatTemplate(tokenizer).encode({&message, 1});
    }
    std::vector<std::uint32_t> tokens = tokenizer.encode(options.prompt, {.text_frame = true});
    if (tokens.empty())
        tokens.push_back(tokenizer.bos().value_or(tokenizer.end_of_document()));
    return tokens;
}

bool ends(const Tokenizer& tokenizer, const GenerateOptions& options, std::uint32_t token) {
    return std::ranges::find(options.ends, token) != options.ends.end() ||
           (options.chat &&
            std::ranges::find(tokenizer.end_tokens(), token) != tokenizer.end_tokens().end());
}

} // namespace

std::string generate_text(LanguageModel& model, const Tokenizer& tokenizer,
                          const GenerateOptions& options) {
    std::vector<std::uint32_t> text = prompt_tokens(tokenizer, options);
    const std::size_t prompt = text.size();
    std::vector<std::uint32_t> without_token;
    for (std::uint32_t id = 0; id < tokenizer.vocabulary(); ++id)
        if (!tokenizer.has_token(id))
            without_token.push_back(id);
    const SamplingParams sampling{options.temperature, options.seed};
    for (std::uint64_t i = 0; i < options.tokens; ++i) {
        std::vector<float> logits = model.next(text);
        logits.resize(tokenizer.vocabulary()); // the model's may be larger
        for (const std::uint32_t id : without_token)
            logits[id] = -std::numeric_limits<float>::infinity();
        const std::uint32_t token = sample_token(logits, sampling, text.size());
        if (ends(tokenizer, options, token))
            break;
        text.push_back(token);
    }
    return tokenizer.decode(std::span(text).subspan(options.chat ? prompt : 0));
}

std::string for_standard_output(const std::string& text) {
    return ProgressReporter::detect(stdout).terminal ? printable(text, "\n\t") : text;
}

WordSet words_of(const Corpus& corpus, const Tokenizer& tokenizer, const WordSet& wanted) {
    constexpr std::uint64_t kPart = 1 << 16; // a word at the seam becomes two
    WordSet words;
    const std::uint64_t end = std::min(corpus.num_tokens(), 256 * kPart);
    for (std::uint64_t first = 0; first < end; first += kPart) {
        std::vector<std::uint32_t> tokens(std::min(kPart, end - first));
        corpus.copy(first, tokens);
        words.add(tokenizer.decode(tokens), wanted);
    }
    return words;
}

namespace {

/// A folder of others does not say how many tokens a sequence has: as many as the text will have.
std::uint64_t tokens_in_all(const GenerateOptions& options, const Tokenizer& tokenizer) {
    constexpr std::uint64_t kStep = 16; // what kernels like
    const ModelConfig& model = options.config.model;
    const std::uint64_t tokens =
        round_up(prompt_tokens(tokenizer, options).size() + options.tokens, kStep);
    return model.max_context > 0 ? std::min(tokens, model.max_context) : tokens;
}

std::unique_ptr<LanguageModel> open_model(const GenerateOptions& options,
                                          const Tokenizer& tokenizer) {
    ProgressReporter progress(stderr, 0, ProgressReporter::detect(stderr));
    LanguageModelOptions model;
    model.timeout = wait_limit(options.config.train);
    model.precision = options.config.train.precision;
    if (options.folder_bytes > 0) {
        model.seq = tokens_in_all(options, tokenizer);
        model.on_progress = ReadingProgress(progress, options.folder_bytes);
    }
    auto opened = std::make_unique<LanguageModel>(
        device_options_of_rank(options.config.train.device, 0), options.checkpoint, model);
    progress.finish();
    return opened;
}

} // namespace

int run_generate(const GenerateOptions& options) {
    constexpr std::uint64_t kMostKnown = std::uint64_t{64} << 20;
    std::optional<TextFiles> known;
    if (!options.known_text.empty()) {
        const std::vector<std::filesystem::path> paths(options.known_text.begin(),
                                                       options.known_text.end());
        known = find_text(paths);
        (void)words_in(*known, WordSet(), kMostKnown); // what is no text shows before the work
    }
    const Tokenizer tokenizer =
        options.tokenizer.empty()
            ? tokenizer_of(Checkpoint::open(options.checkpoint), options.config.train)
            : Tokenizer::from_name(options.tokenizer);
    check_vocabulary(options.config.model, tokenizer);
    const std::unique_ptr<LanguageModel> model = open_model(options, tokenizer);
    const std::string text = generate_text(*model, tokenizer, options);
    const std::string shown = for_standard_output(text) + "\n";
    std::fwrite(shown.data(), 1, shown.size(), stdout);
    std::fflush(stdout);
    if (known) { // what the model wrote, not what it was given
        const auto written = std::string_view(text).substr(
            options.chat ? 0 : std::min(options.prompt.size(), text.size()));
        const WordCheck check =
            check_words(written, words_in(*known, WordSet(written), kMostKnown));
        std::fprintf(stderr, "%s\n", format_word_check(check, "the given text").c_str());
    }
    return 0;
}

} // namespace bellows
