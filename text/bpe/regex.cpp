// SPDX-License-Identifier: MIT
#define PCRE2_CODE_UNIT_WIDTH 8
#include "regex.hpp"

#include "regex_syntax.hpp"

#include <bellows/base/error.hpp>

#include <pcre2.h>

#include <array>
#include <new>

#if PCRE2_MAJOR == 10 && PCRE2_MINOR < 40
#error "Bellows needs PCRE2 10.40 or newer, which knows \p{sc:Han}"
#endif

namespace bellows::text {

namespace {

template <class T>
T* not_null(T* made) {
    if (made == nullptr) {
        throw std::bad_alloc();
    }
    return made;
}

std::string message_of(int code) {
    std::array<PCRE2_UCHAR, 200> text{};
    pcre2_get_error_message(code, text.data(), text.size());
    return reinterpret_cast<const char*>(text.data());
}

} // namespace

void Matcher::Free::operator()(pcre2_match_data* data) const noexcept {
    pcre2_match_data_free(data);
}
void Matcher::Free::operator()(pcre2_match_context* context) const noexcept {
    pcre2_match_context_free(context);
}
void Matcher::Free::operator()(pcre2_jit_stack* stack) const noexcept {
    pcre2_jit_stack_free(stack);
}

Matcher::Matcher()
    : stack_(
          not_null(pcre2_jit_stack_create(std::size_t{32} << 10, std::size_t{4} << 20, nullptr))),
      context_(not_null(pcre2_match_context_create(nullptr))),
      data_(not_null(pcre2_match_data_create(1, nullptr))) {
    constexpr std::uint32_t kMostSteps = 10'000'000;
    constexpr std::uint32_t kMostHeapKiB = 32 << 10;
    pcre2_set_match_limit(context_.get(), kMostSteps);
    pcre2_set_heap_limit(context_.get(), kMostHeapKiB);
    pcre2_jit_stack_assign(context_.get(), nullptr, stack_.get());
}

void Regex::Free::operator()(pcre2_code* code) const noexcept {
    pcre2_code_free(code);
}

Regex::Regex(std::string_view pattern) : pattern_(pattern) {
    compile(pcre2_syntax(pattern));
}

Regex Regex::literal(std::string_view text) {
    std::string pattern;
    for (const char c : text) {
        const bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                           (c >= '0' && c <= '9') || static_cast<unsigned char>(c) >= 0x80;
        pattern.append(plain ? "" : "\\").push_back(c);
    }
    return Regex(pattern);
}

void Regex::compile(const std::string& pattern) {
    const std::unique_ptr<pcre2_compile_context, decltype(&pcre2_compile_context_free)> context(
        not_null(pcre2_compile_context_create(nullptr)), &pcre2_compile_context_free);
    pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
    // As Oniguruma: ^ and $ stand at every line.
    constexpr std::uint32_t kOptions =
        PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C | PCRE2_NO_AUTO_CAPTURE;
    int error = 0;
    std::size_t where = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                              kOptions, &error, &where, context.get()));
    if (!code_) {
        throw Error(ErrorCode::Unsupported, "the regular expression " + in_quotes(pattern_) +
                                                " is not supported: " + message_of(error));
    }
    compiled_to_machine_code_ = pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE) == 0;
}

Regex::Match Regex::find(std::string_view text, std::size_t from, Matcher& matcher) const {
    const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
    int found = PCRE2_ERROR_JIT_STACKLIMIT;
    if (compiled_to_machine_code_) {
        found = pcre2_jit_match(code_.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK,
                                matcher.data_.get(), matcher.context_.get());
    }
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) { // the other way takes memory from the heap
        found =
            pcre2_match(code_.get(), subject, text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                        matcher.data_.get(), matcher.context_.get());
    }
    if (found == PCRE2_ERROR_NOMATCH) {
        return {};
    }
    if (found < 0) {
        throw Error(ErrorCode::Unsupported,
                    "the regular expression " + in_quotes(pattern_) +
                        " cannot be used on this text: " + message_of(found));
    }
    const std::size_t* ends = pcre2_get_ovector_pointer(matcher.data_.get());
    return {ends[0], ends[1], true};
}

} // namespace bellows::text
