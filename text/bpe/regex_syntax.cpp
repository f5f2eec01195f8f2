// SPDX-License-Identifier: MIT
#include "regex_syntax.hpp"

#include "utf8.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <array>

namespace bellows::text {

namespace {

constexpr std::size_t kLongestPattern = std::size_t{16} << 10;
constexpr std::size_t kDeepestGroup = 32;

class Translator {
public:
    explicit Translator(std::string_view pattern) : pattern_(pattern) {}

    std::string run() {
        if (pattern_.size() > kLongestPattern) {
            refuse("it has more than " + std::to_string(kLongestPattern) + " bytes");
        }
        if (!is_utf8(pattern_)) {
            refuse("it is not UTF-8");
        }
        while (at_ < pattern_.size()) {
            const char c = pattern_[at_];
            if (c == '\\') {
                escape();
            } else if (in_class_) {
                inside_class(c);
            } else {
                outside_class(c);
            }
        }
        return std::move(out_);
    }

private:
    [[noreturn]] void refuse(const std::string& why) const {
        throw Error(ErrorCode::Unsupported,
                    "the regular expression " + in_quotes(pattern_) + " is not supported: " + why);
    }
    bool follows(std::string_view text) const { return pattern_.substr(at_).starts_with(text); }
    void copy(std::size_t bytes) {
        out_.append(pattern_, at_, bytes);
        at_ += bytes;
    }

    void inside_class(char c) {
        if (c == '[') {
            refuse("a class inside a class");
        }
        if (follows("&&")) {
            refuse("&& in a class");
        }
        if (c == ']' && at_ != class_first_) {
            in_class_ = false;
        }
        copy(1);
    }

    void outside_class(char c) {
        if (c == '[') {
            in_class_ = true;
            copy(1);
            if (follows("^")) {
                copy(1);
            }
            class_first_ = at_;
            if (follows("]")) {
                refuse("an empty class");
            }
        } else if (c == '(') {
            group();
        } else if (c == ')') {
            depth_ -= depth_ > 0 ? 1 : 0; // PCRE2 names what is out of balance
            copy(1);
        } else if (follows("}+")) {
            refuse("\"}+\"");
        } else {
            copy(1);
        }
    }

    void group() {
        constexpr std::array kGroups = {"(?:", "(?i:", "(?=", "(?!", "(?<=", "(?<!", "(?>"};
        if (++depth_ > kDeepestGroup) {
            refuse("groups more than " + std::to_string(kDeepestGroup) + " deep");
        }
        if (follows("(*")) {
            refuse("\"(*\"");
        }
        if (follows("(?")) {
            for (const std::string_view known : kGroups) {
                if (follows(known)) {
                    copy(known.size());
                    return;
                }
            }
            refuse(in_quotes(pattern_.substr(at_, 3)));
        }
        out_ += "(?:"; // nothing refers to groups
        ++at_;
    }

    void escape() {
        if (at_ + 1 == pattern_.size()) {
            refuse("it ends with a backslash");
        }
        const char c = pattern_[at_ + 1];
        const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        const bool digit = c >= '0' && c <= '9';
        if (c == 'p' || c == 'P') {
            property();
        } else if (c == 'x' || c == 'u') {
            code_point();
        } else if ((!letter && !digit) ||
                   std::string_view("sSdDrntf").find(c) != std::string::npos) {
            copy(2);
        } else {
            refuse("the escape " + in_quotes(pattern_.substr(at_, 2)));
        }
    }

    /// \p{Han} of PCRE2 means characters that are used with Han, too.
    void property() {
        constexpr std::string_view kHan = "{Han}";
        if (pattern_.substr(at_ + 2).starts_with(kHan)) {
            out_.append(pattern_, at_, 2).append("{sc:Han}");
            at_ += 2 + kHan.size();
            return;
        }
        const std::size_t end = pattern_.find('}', at_);
        if (pattern_.size() < at_ + 3 || pattern_[at_ + 2] != '{' ||
            end == std::string_view::npos) {
            refuse("a property without {}");
        }
        const std::string_view name = pattern_.substr(at_ + 3, end - at_ - 3);
        if (name.empty() || name.size() > 2 ||
            std::string_view("LMNPSZC").find(name[0]) == std::string::npos) {
            refuse("the property " + in_quotes(name));
        }
        copy(end + 1 - at_);
    }

    /// \uHHHH and \xHH, \x{H...}.
    void code_point() {
        const bool braces = pattern_.substr(at_).starts_with("\\x{");
        const std::size_t first = at_ + (braces ? 3 : 2);
        const std::size_t most = braces ? 6 : pattern_[at_ + 1] == 'u' ? 4 : 2;
        std::size_t end = first;
        while (end < pattern_.size() && end < first + most &&
               std::string_view("0123456789abcdefABCDEF").find(pattern_[end]) !=
                   std::string::npos) {
            ++end;
        }
        if (end == first || (!braces && end != first + most) ||
            (braces && (end == pattern_.size() || pattern_[end] != '}'))) {
            refuse("a code point without its digits");
        }
        out_.append("\\x{").append(pattern_, first, end - first).append("}");
        at_ = end + (braces ? 1 : 0);
    }

    std::string_view pattern_;
    std::string out_;
    std::size_t at_ = 0;
    std::size_t depth_ = 0;
    bool in_class_ = false;
    std::size_t class_first_ = 0;
};

} // namespace

std::string pcre2_syntax(std::string_view pattern) {
    // The same matches, without a search from every blank of a long run of them.
    return pattern == "\\s+$" ? "(?<!\\s)\\s+$" : Translator(pattern).run();
}

} // namespace bellows::text
