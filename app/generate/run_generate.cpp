// SPDX-License-Identifier: MIT
// The body of `bellows generate`: one rank, the whole model, all prompts at once.
#include "app/generate/writer.hpp"
#include "app/progress.hpp"
#include "app/run.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/printable.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <vector>

namespace bellows {

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

constexpr std::uint64_t kMostKnown = std::uint64_t{64} << 20;

void print(const std::string& text) {
    std::fwrite(text.data(), 1, text.size(), stdout);
    std::fflush(stdout);
}

/// Tokens that texts will have; a run's own model sees as many as it was trained with.
std::uint64_t context_of(const GenerateOptions& options,
                         const std::vector<std::vector<std::uint32_t>>& prompts) {
    if (options.context > 0)
        return options.context;
    if (options.folder_bytes == 0)
        return options.config.train.seq;
    std::size_t longest = 0;
    for (const auto& prompt : prompts)
        longest = std::max(longest, prompt.size());
    return longest + options.text.tokens;
}

std::string json_line(const std::string& prompt, const Written& written) {
    const nlohmann::ordered_json line = {{"prompt", prompt},
                                         {"text", written.text},
                                         {"finish_reason", to_string(written.reason)},
                                         {"prompt_tokens", written.prompt_tokens},
                                         {"tokens", written.tokens.size()}};
    return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

/// One prompt is shown with its text as this grows, several ones each with its own when all end.
std::vector<Written> write_and_show(Writer& writer, const GenerateOptions& options,
                                    const std::vector<std::vector<std::uint32_t>>& prompts) {
    const bool one = prompts.size() == 1 && !options.json;
    if (one && !options.chat)
        print(for_standard_output(options.prompts.front()));
    const std::vector<Written> written =
        writer.write(prompts, options.text, [&](std::size_t, const std::string& piece) {
            if (one)
                print(for_standard_output(piece));
        });
    if (one)
        print("\n");
    for (std::size_t i = 0; !one && i < written.size(); ++i)
        print(options.json ? json_line(options.prompts[i], written[i])
                           : for_standard_output((options.chat ? "" : options.prompts[i]) +
                                                 written[i].text) +
                                 (i + 1 < written.size() ? "\n\n" : "\n"));
    return written;
}

} // namespace

int run_generate(const GenerateOptions& options) {
    std::optional<TextFiles> known;
    if (!options.known_text.empty()) {
        const std::vector<std::filesystem::path> paths(options.known_text.begin(),
                                                       options.known_text.end());
        known = find_text(paths);
        (void)words_in(*known, WordSet(), kMostKnown); // what is no text shows before the work
    }
    const Tokenizer tokenizer = tokenizer_of(options);
    std::vector<std::vector<std::uint32_t>> prompts;
    for (const std::string& prompt : options.prompts)
        prompts.push_back(prompt_tokens(tokenizer, prompt, options));
    const auto engine =
        open_engine(options, tokenizer, context_of(options, prompts), prompts.size());
    Writer writer(*engine, tokenizer);
    const std::vector<Written> written = write_and_show(writer, options, prompts);
    std::fprintf(stderr, "%s\n", format_times(writer.times()).c_str());
    const auto failed = static_cast<std::size_t>(
        std::ranges::count(written, FinishReason::Failed, &Written::reason));
    if (failed > 0)
        throw Error(
            ErrorCode::Corrupt,
            std::to_string(failed) + " of " + std::to_string(written.size()) +
                " texts ended early: the model's logits are not finite; look at its weights "
                "with another --precision");
    if (known) { // what the model wrote, not what it was given
        std::string text;
        for (const Written& one : written)
            text += one.text + "\n";
        const WordCheck check = check_words(text, words_in(*known, WordSet(text), kMostKnown));
        std::fprintf(stderr, "%s\n", format_word_check(check, "the given text").c_str());
    }
    return 0;
}

} // namespace bellows
