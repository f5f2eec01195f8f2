// SPDX-License-Identifier: MIT
// The body of `bellows generate`: all prompts at once, on one rank or shared out among several,
// which share the model's experts.
#include "app/generate/shared_texts.hpp"
#include "app/generate/writer.hpp"
#include "app/progress.hpp"
#include "app/run.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/printable.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/comm/launch.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <vector>

namespace bellows {

std::string for_standard_output(const std::string& text) {
    static const bool terminal = ProgressReporter::detect(stdout).terminal;
    return terminal ? printable(text, "\n\t") : text;
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
    nlohmann::ordered_json line = {{"prompt", prompt},
                                   {"text", written.text},
                                   {"finish_reason", to_string(written.reason)},
                                   {"prompt_tokens", written.prompt_tokens},
                                   {"tokens", written.tokens.size()}};
    if (written.drafted > 0) {
        line["drafted"] = written.drafted;
        line["accepted"] = written.accepted;
    }
    if (written.degraded)
        line["degraded"] = true;
    return line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

/// One prompt is shown with its text as this grows, several ones each with its own when all end.
bool shown_at_once(const GenerateOptions& options) {
    return options.prompts.size() == 1 && !options.json;
}

void show(const GenerateOptions& options, const std::vector<Written>& written) {
    if (shown_at_once(options))
        return print("\n");
    for (std::size_t i = 0; i < written.size(); ++i)
        print(options.json ? json_line(options.prompts[i], written[i])
                           : for_standard_output((options.chat ? "" : options.prompts[i]) +
                                                 written[i].text) +
                                 (i + 1 < written.size() ? "\n\n" : "\n"));
}

void report(const std::vector<Written>& written, const WritingTimes& times,
            const std::optional<TextFiles>& known) {
    std::fprintf(stderr, "%s\n", format_times(times).c_str());
    const auto count = [&](const auto& which) {
        return std::to_string(std::ranges::count_if(written, which));
    };
    if (std::ranges::any_of(written, &Written::degraded))
        std::fprintf(stderr,
                     "bellows: %s of %zu texts lack what experts of lost ranks would have added, "
                     "or their rank is lost\n",
                     count(&Written::degraded).c_str(), written.size());
    const auto broken = [](const Written& one) {
        return one.reason == FinishReason::Failed && !one.degraded;
    };
    if (std::ranges::any_of(written, broken))
        throw Error(ErrorCode::Corrupt,
                    count(broken) + " of " + std::to_string(written.size()) +
                        " texts ended early: the model's logits are not finite; look at its "
                        "weights with another --precision");
    if (!known)
        return;
    std::string text; // what the model wrote, not what it was given
    for (const Written& one : written)
        text += one.text + "\n";
    const WordCheck check = check_words(text, words_in(*known, WordSet(text), kMostKnown));
    std::fprintf(stderr, "%s\n", format_word_check(check, "the given text").c_str());
}

/// world: of the ranks that share prompts and experts; null: this rank has all.
int generate(const GenerateOptions& options, World* world) {
    const int rank = world == nullptr ? 0 : world->rank();
    const auto ranks = static_cast<std::size_t>(world == nullptr ? 1 : world->size());
    std::optional<TextFiles> known;
    if (!options.known_text.empty()) {
        const std::vector<std::filesystem::path> paths(options.known_text.begin(),
                                                       options.known_text.end());
        known = find_text(paths);
        (void)words_in(*known, WordSet(), kMostKnown); // what is no text shows before the work
    }
    const Tokenizer tokenizer = tokenizer_of(options);
    std::vector<std::vector<std::uint32_t>> prompts, mine;
    for (const std::string& prompt : options.prompts)
        prompts.push_back(prompt_tokens(tokenizer, prompt, options));
    for (std::size_t i = static_cast<std::size_t>(rank); i < prompts.size(); i += ranks)
        mine.push_back(prompts[i]);
    const auto engine = open_engine(options, tokenizer, context_of(options, prompts),
                                    div_up(prompts.size(), ranks), world);
    Writer writer(*engine, tokenizer);
    if (shown_at_once(options) && !options.chat && rank == 0)
        print(for_standard_output(options.prompts.front()));
    std::vector<Written> written =
        writer.write(mine, options.text, [&](std::size_t, const std::string& piece) {
            if (shown_at_once(options))
                print(for_standard_output(piece));
        });
    WritingTimes times = writer.times();
    if (world != nullptr && !gather_texts(*world, prompts.size(), written, times))
        return 0; // another rank shows them
    show(options, written);
    report(written, times, known);
    return 0;
}

} // namespace

int run_generate(const GenerateOptions& options) {
    if (options.ranks == 1 && !is_launched())
        return generate(options, nullptr);
    WorldOptions of_world;
    of_world.control.outlive_lost_ranks = options.allow_degraded;
    return in_world(
        [&](World& world) {
            if (static_cast<std::uint64_t>(world.size()) != options.ranks)
                throw Error(ErrorCode::InvalidArgument,
                            "--ranks says " + std::to_string(options.ranks) + ", but there are " +
                                std::to_string(world.size()));
            return generate(options, &world);
        },
        of_world);
}

} // namespace bellows
