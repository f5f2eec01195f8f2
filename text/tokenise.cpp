// SPDX-License-Identifier: MIT
#include "tokenise.hpp"

#include "block_reader.hpp"
#include "encoder.hpp"
#include "fingerprint.hpp"
#include "text_errors.hpp"
#include "tokenizer_impl.hpp"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace bellows::text {

namespace {

/// Threads take blocks in order, encode them, and whoever has the next in order writes.
class Pipeline {
public:
    Pipeline(const TextFiles& text, const Tokenizer& tokenizer, unsigned threads,
             const std::function<void(std::span<const std::uint8_t>)>& write)
        : text_(text), tokenizer_(tokenizer), width_(token_bytes(tokenizer.vocabulary())),
          write_(write), most_ahead_(2 * std::uint64_t{threads}), running_(threads),
          reader_(text, cut_of(tokenizer)) {
        try {
            for (unsigned i = 0; i < threads; ++i) {
                threads_.emplace_back([this] { work(); });
            }
        } catch (...) { // fewer threads than wanted
            join(std::current_exception());
            throw;
        }
    }
    ~Pipeline() { join(nullptr); }
    Pipeline(const Pipeline&) = delete;
    Pipeline& operator=(const Pipeline&) = delete;

    Tokenised run(const TokeniseOptions& options) {
        constexpr std::chrono::milliseconds kBetweenReports{100};
        std::unique_lock lock(state_);
        while (!changed_.wait_for(lock, kBetweenReports, [this] { return running_ == 0; })) {
            const std::uint64_t done = bytes_done_;
            lock.unlock();
            report(options, done);
            lock.lock();
        }
        lock.unlock();
        join(nullptr);
        if (failure_) {
            std::rethrow_exception(failure_);
        }
        report(options, text_.bytes());
        result_.num_text_bytes = reader_.num_text_bytes();
        result_.num_documents = reader_.num_documents();
        result_.binary = reader_.binary();
        result_.content = content_.value();
        return std::move(result_);
    }

private:
    struct Encoded {
        std::vector<std::uint8_t> tokens;
        std::uint64_t content = 0;
        std::uint64_t text_bytes = 0;
    };

    static Cut cut_of(const Tokenizer& tokenizer) { return TextEncoder(tokenizer).cut(); }

    void report(const TokeniseOptions& options, std::uint64_t done) const {
        if (options.progress) {
            options.progress(done, text_.bytes());
        }
    }

    void work() noexcept {
        try {
            TextEncoder encoder(tokenizer_);
            std::vector<std::uint32_t> ids;
            Block block;
            for (std::uint64_t number = 0; take(block, number);) {
                ids.clear();
                for (const Block::Part& part : block.parts) {
                    encoder.encode(
                        std::string_view(block.text).substr(part.first, part.end - part.first),
                        part.before, part.ends_document, ids);
                    if (part.ends_document) {
                        ids.push_back(tokenizer_.end_of_document());
                    }
                }
                Encoded encoded;
                pack_tokens(ids, width_, encoded.tokens);
                const auto* bytes = reinterpret_cast<const char*>(encoded.tokens.data());
                encoded.content =
                    Fingerprint().add(std::string_view(bytes, encoded.tokens.size())).value();
                encoded.text_bytes = block.text.size();
                hand_over(number, std::move(encoded));
            }
        } catch (...) {
            fail(std::current_exception());
        }
        const std::lock_guard lock(state_);
        --running_;
        changed_.notify_all();
    }

    bool take(Block& block, std::uint64_t& number) {
        const std::lock_guard lock(reading_);
        if (stopped() || !reader_.next(block)) {
            return false;
        }
        number = taken_++;
        return true;
    }

    void hand_over(std::uint64_t number, Encoded encoded) {
        std::unique_lock lock(state_);
        // The thread with the next block in order never waits here, so that the others go on.
        changed_.wait(lock, [&] { return failure_ || number < written_ + most_ahead_; });
        if (failure_) {
            return;
        }
        ahead_.emplace(number, std::move(encoded));
        for (auto next = ahead_.begin(); next != ahead_.end() && next->first == written_;
             next = ahead_.erase(next)) {
            const Encoded& block = next->second;
            write_(block.tokens);
            result_.num_tokens += block.tokens.size() / width_;
            content_.add(block.content);
            bytes_done_ += block.text_bytes;
            ++written_;
        }
        changed_.notify_all();
    }

    bool stopped() {
        const std::lock_guard lock(state_);
        return failure_ != nullptr;
    }

    /// The first failure counts.
    void fail(std::exception_ptr failure) {
        const std::lock_guard lock(state_);
        if (!failure_) {
            failure_ = std::move(failure);
        }
        changed_.notify_all();
    }

    /// Without a result, where it has not ended.
    void join(std::exception_ptr failure) noexcept {
        {
            const std::lock_guard lock(state_);
            if (!failure_ && (failure || running_ > 0)) {
                failure_ = failure ? failure : std::make_exception_ptr(Stopped());
            }
            changed_.notify_all();
        }
        for (std::thread& thread : threads_) {
            if (thread.joinable()) {
                thread.join();
            }
        }
    }

    struct Stopped {};

    const TextFiles& text_;
    const Tokenizer& tokenizer_;
    const std::uint32_t width_;
    const std::function<void(std::span<const std::uint8_t>)>& write_;
    const std::uint64_t most_ahead_;

    std::mutex state_;
    std::condition_variable changed_;
    unsigned running_;
    std::map<std::uint64_t, Encoded> ahead_;
    std::uint64_t written_ = 0; ///< blocks
    std::uint64_t bytes_done_ = 0;
    Tokenised result_;
    Fingerprint content_;
    std::exception_ptr failure_;

    std::mutex reading_; // before state_
    BlockReader reader_;
    std::uint64_t taken_ = 0; ///< blocks

    std::vector<std::thread> threads_;
};

} // namespace

std::uint32_t token_bytes(std::uint32_t vocabulary) noexcept {
    return vocabulary <= 256 ? 1 : vocabulary <= 65536 ? 2 : 4;
}

void pack_tokens(std::span<const std::uint32_t> ids, std::uint32_t width,
                 std::vector<std::uint8_t>& out) {
    out.reserve(out.size() + ids.size() * width);
    for (const std::uint32_t id : ids) {
        for (std::uint32_t byte = 0; byte < width; ++byte) {
            out.push_back(static_cast<std::uint8_t>(id >> (8 * byte)));
        }
    }
}

Tokenised tokenise(const TextFiles& text, const Tokenizer& tokenizer,
                   const TokeniseOptions& options,
                   const std::function<void(std::span<const std::uint8_t>)>& write) {
    const unsigned threads =
        options.threads > 0 ? options.threads : std::max(1u, std::thread::hardware_concurrency());
    Tokenised result = Pipeline(text, tokenizer, threads, write).run(options);
    if (result.num_documents == 0) {
        throw_no_text(text, text.skipped.size() + result.binary.size());
    }
    return result;
}

} // namespace bellows::text
