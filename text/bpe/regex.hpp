// SPDX-License-Identifier: MIT
#pragma once

// A regular expression of a tokenizer file, which is written for Oniguruma, by PCRE2. What the two
// understand differently is refused. Immutable; any thread, each with a Matcher of its own.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

struct pcre2_real_code_8;
struct pcre2_real_match_data_8;
struct pcre2_real_match_context_8;
struct pcre2_real_jit_stack_8;

namespace bellows::text {

/// What a thread needs for matching, with any expression.
class Matcher {
public:
    Matcher();
    Matcher(Matcher&&) noexcept = default;
    Matcher& operator=(Matcher&&) noexcept = default;

private:
    friend class Regex;
    struct Free {
        void operator()(pcre2_real_match_data_8*) const noexcept;
        void operator()(pcre2_real_match_context_8*) const noexcept;
        void operator()(pcre2_real_jit_stack_8*) const noexcept;
    };
    std::unique_ptr<pcre2_real_jit_stack_8, Free> stack_;
    std::unique_ptr<pcre2_real_match_context_8, Free> context_;
    std::unique_ptr<pcre2_real_match_data_8, Free> data_;
};

class Regex {
public:
    /// Throws Error{Unsupported} for what is not understood, with the expression.
    explicit Regex(std::string_view pattern);
    /// One that matches this text.
    static Regex literal(std::string_view text);

    struct Match {
        std::size_t first = 0, end = 0;
        bool found = false;
    };
    /// The first match at `from` or behind it. text: UTF-8. Throws Error{Unsupported} if it takes
    /// too many steps.
    Match find(std::string_view text, std::size_t from, Matcher& matcher) const;

private:
    struct Free {
        void operator()(pcre2_real_code_8*) const noexcept;
    };
    Regex() = default;
    void compile(const std::string& pattern);

    std::string pattern_; ///< for messages
    std::unique_ptr<pcre2_real_code_8, Free> code_;
    bool compiled_to_machine_code_ = false;
};

} // namespace bellows::text
