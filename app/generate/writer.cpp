// SPDX-License-Identifier: MIT
#include "app/generate/writer.hpp"

#include "app/model_folder.hpp"
#include "app/progress.hpp"
#include "app/units.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>
#include <bellows/engine/device_choice.hpp>
#include <bellows/text/chat_template.hpp>

#include <algorithm>
#include <chrono>

namespace bellows {

namespace {

std::string rate(std::uint64_t tokens, double seconds) {
    const std::string count = std::to_string(tokens) + (tokens == 1 ? " token" : " tokens");
    return seconds > 0
               ? count + ", " + printed("%.1f", static_cast<double>(tokens) / seconds) + " tokens/s"
               : count;
}

} // namespace

std::string format_times(const WritingTimes& times) {
    const std::string drafts = times.drafted == 0
                                   ? ""
                                   : "; " + std::to_string(times.drafted) + " drafts, " +
                                         percent(static_cast<double>(times.accepted) /
                                                 static_cast<double>(times.drafted)) +
                                         " accepted";
    return "prompt: " + rate(times.prompt_tokens, times.prompt_seconds) +
           "; text: " + rate(times.tokens, times.seconds) + drafts;
}

struct Writer::Text {
    Text(const Tokenizer& tokenizer, const TextOptions& options,
         const std::vector<std::uint32_t>& prompt)
        : answer(tokenizer, options.stop), tokens(prompt), left(options.tokens) {
        written.prompt_tokens = prompt.size();
    }

    AnswerText answer;
    std::vector<std::uint32_t> tokens; ///< prompt and text
    std::uint64_t left;                ///< tokens that may still be written
    std::uint64_t submissions = 0;
    RequestId id = 0;
    Written written;

    bool active() const noexcept { return written.reason == FinishReason::None; }
};

void Writer::submit(Text& text, const TextOptions& options) {
    Request request;
    const std::uint64_t context = engine_.max_context();
    const std::uint64_t used =
        text.tokens.size() < context ? text.tokens.size() : std::max<std::uint64_t>(context / 2, 1);
    request.prompt.assign(text.tokens.end() - static_cast<std::ptrdiff_t>(used), text.tokens.end());
    request.max_tokens = text.left;
    request.sampling = options.sampling;
    // Positions begin anew, draws shall not.
    request.sampling.seed += text.submissions++ << 32;
    request.end_tokens = options.ends;
    const std::vector<std::uint32_t>& ends = tokenizer_.end_tokens();
    request.end_tokens.insert(request.end_tokens.end(), ends.begin(), ends.end());
    request.ignore_end = options.ignore_end;
    text.id = engine_.submit(std::move(request));
}

void Writer::take(Text& text, const TextOptions& options, std::size_t index,
                  const OnText& on_text) {
    const AnswerPart part = engine_.poll(text.id);
    text.written.cached_tokens = std::max(text.written.cached_tokens, part.usage.cached);
    text.written.degraded |= part.degraded;
    if (part.reason != FinishReason::None) {
        text.written.drafted += part.usage.drafted;
        text.written.accepted += part.usage.accepted;
    }
    const auto show = [&](const std::string& piece) {
        text.written.text += piece;
        if (on_text && !piece.empty())
            on_text(index, piece);
    };
    for (std::size_t i = 0; i < part.tokens.size(); ++i) {
        const std::uint32_t token = part.tokens[i];
        text.written.tokens.push_back(token);
        text.tokens.push_back(token);
        --text.left;
        const bool end = part.reason == FinishReason::EndToken && i + 1 == part.tokens.size();
        if (!end && !text.answer.stopped())
            show(text.answer.add({&token, 1}));
    }
    FinishReason reason = part.reason;
    if (text.answer.stopped()) {
        if (reason == FinishReason::None) {
            engine_.cancel(text.id);
            (void)engine_.poll(text.id);
        }
        reason = FinishReason::StopString;
    }
    if (reason == FinishReason::Context && text.left > 0)
        return submit(text, options);
    text.written.reason = reason;
    if (reason != FinishReason::None && !text.answer.stopped())
        show(text.answer.finish());
}

std::vector<Written> Writer::write(std::span<const std::vector<std::uint32_t>> prompts,
                                   const TextOptions& options, const OnText& on_text,
                                   const Stop& stop) {
    using Clock = std::chrono::steady_clock;
    std::vector<Text> texts;
    texts.reserve(prompts.size());
    for (const std::vector<std::uint32_t>& prompt : prompts)
        submit(texts.emplace_back(tokenizer_, options, prompt), options);
    EngineCounters before = engine_.counters();
    while (true) {
        const Clock::time_point start = Clock::now();
        if (!engine_.step())
            break;
        const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
        const EngineCounters now = engine_.counters();
        const std::uint64_t drafted = now.drafted - before.drafted,
                            accepted = now.accepted - before.accepted;
        times_.drafted += drafted;
        times_.accepted += accepted;
        const std::uint64_t computed =
                                now.computed_tokens - before.computed_tokens - (drafted - accepted),
                            drawn = now.generated_tokens - before.generated_tokens;
        before = now;
        (computed > drawn ? times_.prompt_seconds : times_.seconds) += seconds;
        if (computed > drawn)
            times_.prompt_tokens += computed;
        else
            times_.tokens += drawn;
        const bool ends = stop && stop();
        for (std::size_t i = 0; i < texts.size(); ++i) {
            if (!texts[i].active())
                continue;
            if (ends)
                engine_.cancel(texts[i].id);
            take(texts[i], options, i, on_text);
        }
    }
    if (std::ranges::any_of(texts, &Text::active))
        throw Error(ErrorCode::Internal, "texts are not finished, but nothing is to be done");
    std::vector<Written> written;
    for (Text& text : texts)
        written.push_back(std::move(text.written));
    return written;
}

std::vector<std::uint32_t> prompt_tokens(const Tokenizer& tokenizer, const std::string& prompt,
                                         const GenerateOptions& options) {
    if (options.chat) {
        std::vector<ChatMessage> messages;
        if (!options.system.empty())
            messages.push_back({"system", options.system});
        messages.push_back({"user", prompt});
        return ChatTemplate(tokenizer).encode(messages);
    }
    std::vector<std::uint32_t> tokens = tokenizer.encode(prompt, {.text_frame = true});
    if (tokens.empty())
        tokens.push_back(tokenizer.bos().value_or(tokenizer.end_of_document()));
    return tokens;
}

Tokenizer tokenizer_of(const GenerateOptions& options) {
    Tokenizer tokenizer =
        options.tokenizer.empty()
            ? tokenizer_of(Checkpoint::open(options.checkpoint), options.config.train)
            : Tokenizer::from_name(options.tokenizer);
    check_vocabulary(options.config.model, tokenizer);
    return tokenizer;
}

std::unique_ptr<Engine> open_engine(const GenerateOptions& options, const Tokenizer& tokenizer,
                                    std::uint64_t context, std::uint64_t texts, World* world) {
    constexpr std::uint64_t kMostTexts = 64;
    const int local_rank = world == nullptr ? 0 : world->local_rank();
    ProgressReporter progress(stderr, 0, ProgressReporter::detect(stderr));
    EngineOptions engine;
    engine.timeout = wait_limit(options.config.train);
    engine.precision = options.config.train.precision;
    engine.cache_type = options.cache_type;
    const std::uint64_t most = options.config.model.max_context;
    engine.max_context = most > 0 ? std::min(context, most) : context;
    engine.max_sequences = std::clamp<std::uint64_t>(texts, 1, kMostTexts);
    engine.exact = options.exact;
    engine.draft = options.draft;
    engine.tokenizer = &tokenizer;
    engine.world = world;
    engine.placement = options.placement;
    engine.allow_degraded = options.allow_degraded;
    if (options.folder_bytes > 0 && (world == nullptr || world->rank() == 0))
        engine.on_progress = ReadingProgress(progress, options.folder_bytes);
    auto opened =
        std::make_unique<Engine>(device_options_of_rank(options.config.train.device, local_rank),
                                 options.checkpoint, engine);
    progress.finish();
    return opened;
}

} // namespace bellows
