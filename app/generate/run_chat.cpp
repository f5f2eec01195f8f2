// SPDX-License-Identifier: MIT
// The body of `bellows chat`: a conversation in a terminal. What was said before is found in the
// cache, so that each turn computes only what is new.
#include "app/generate/writer.hpp"
#include "app/progress.hpp"
#include "app/run.hpp"
#include "app/units.hpp"

#include <bellows/text/chat_template.hpp>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include <unistd.h>

namespace bellows {

namespace {

constexpr std::uint64_t kUsualContext = 4096;

std::atomic<bool> interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler sets it");

/// Ctrl-C interrupts what waits, too.
void watch_interrupts() {
    struct sigaction action{};
    action.sa_handler = [](int) { interrupted = true; };
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, nullptr);
}

/// A line of standard input without its end; nothing at the end of input or when interrupted.
class Lines {
public:
    std::optional<std::string> next() {
        for (;;) {
            if (const std::size_t end = read_.find('\n'); end != std::string::npos) {
                std::string line = read_.substr(0, end);
                read_.erase(0, end + 1);
                return line;
            }
            char bytes[4096];
            const ssize_t count = ::read(STDIN_FILENO, bytes, sizeof bytes);
            if (count > 0) {
                read_.append(bytes, static_cast<std::size_t>(count));
                continue;
            }
            if (count < 0 && errno == EINTR && !interrupted)
                continue;
            if (read_.empty() || interrupted)
                return std::nullopt;
            return std::exchange(read_, {}); // the last line has no end
        }
    }

private:
    std::string read_;
};

class Conversation {
public:
    Conversation(const GenerateOptions& options, const Tokenizer& tokenizer,
                 const ChatTemplate& chat_template, Engine& engine)
        : options_(options), tokenizer_(tokenizer), template_(chat_template), engine_(engine) {
        clear();
    }

    void clear() {
        messages_.clear();
        if (!options_.system.empty())
            messages_.push_back({"system", options_.system});
    }

    void answer(const std::string& line) {
        messages_.push_back({"user", line});
        const std::vector<std::uint32_t> prompt = tokens_that_fit();
        interrupted = false;
        Writer writer(engine_, tokenizer_); // its times are of this answer
        const std::vector<Written> written = writer.write(
            {&prompt, 1}, options_.text,
            [](std::size_t, const std::string& piece) {
                const std::string shown = for_standard_output(piece);
                std::fwrite(shown.data(), 1, shown.size(), stdout);
                std::fflush(stdout);
            },
            [] { return interrupted.load(); });
        interrupted = false;
        std::printf("\n");
        std::fflush(stdout);
        messages_.push_back({"assistant", written.front().text});
        if (options_.show_times)
            std::fprintf(stderr, "(%llu tokens, %llu of them in the cache; %s)\n",
                         static_cast<unsigned long long>(written.front().prompt_tokens),
                         static_cast<unsigned long long>(written.front().cached_tokens),
                         format_times(writer.times()).c_str());
    }

private:
    /// Returns the conversation's tokens. Where they leave no room for an answer, it forgets the
    /// oldest turns first.
    std::vector<std::uint32_t> tokens_that_fit() {
        const std::uint64_t room = engine_.max_context() / 4;
        for (;;) {
            std::vector<std::uint32_t> tokens = template_.encode(messages_);
            const std::size_t first = !options_.system.empty() ? 1 : 0;
            if (tokens.size() + room <= engine_.max_context() || messages_.size() < first + 3)
                return tokens;
            messages_.erase(messages_.begin() + static_cast<std::ptrdiff_t>(first),
                            messages_.begin() + static_cast<std::ptrdiff_t>(first + 2));
            std::fprintf(stderr, "(the context is full: the oldest question is forgotten)\n");
        }
    }

    const GenerateOptions& options_;
    const Tokenizer& tokenizer_;
    const ChatTemplate& template_;
    Engine& engine_;
    std::vector<ChatMessage> messages_;
};

} // namespace

int run_chat(const GenerateOptions& options) {
    const Tokenizer tokenizer = tokenizer_of(options);
    const ChatTemplate chat_template(tokenizer); // an error comes before the model is read
    const std::uint64_t most = options.config.model.max_context,
                        context = options.context > 0         ? options.context
                                  : options.folder_bytes == 0 ? options.config.train.seq
                                  : most > 0                  ? std::min(most, kUsualContext)
                                                              : kUsualContext;
    const auto engine = open_engine(options, tokenizer, context, 1);
    Conversation conversation(options, tokenizer, chat_template, *engine);
    watch_interrupts();
    const bool terminal = ::isatty(STDIN_FILENO) != 0;
    if (terminal)
        std::fprintf(stderr, "Ctrl-C stops an answer, /clear begins anew, Ctrl-D ends.\n");
    Lines lines;
    for (;;) {
        if (terminal) {
            std::printf("> ");
            std::fflush(stdout);
        }
        const std::optional<std::string> line = lines.next();
        if (!line)
            break;
        if (*line == "/exit")
            break;
        if (*line == "/clear")
            conversation.clear();
        else if (!line->empty())
            conversation.answer(*line);
    }
    if (terminal)
        std::printf("\n");
    return 0;
}

} // namespace bellows
