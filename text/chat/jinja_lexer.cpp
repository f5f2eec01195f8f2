// SPDX-License-Identifier: MIT
#include "jinja_lexer.hpp"

#include "text/bpe/utf8.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <array>
#include <utility>

namespace bellows::text::jinja {

namespace {

using Kind = Token::Kind;

constexpr std::size_t kLongestTemplate = std::size_t{1} << 20;

bool is_space(char c) {
    return c == ' ' || (c >= '\t' && c <= '\r');
}
bool is_name(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

class Lexer {
public:
    explicit Lexer(std::string_view source) {
        if (source.size() > kLongestTemplate) {
            refuse(1, "it has more than " + std::to_string(kLongestTemplate) + " bytes");
        }
        if (!is_utf8(source)) {
            refuse(1, "it is not UTF-8");
        }
        for (std::size_t i = 0; i < source.size(); ++i) { // newlines of all kinds
            const bool pair = source[i] == '\r' && source.substr(i + 1).starts_with('\n');
            source_ += source[i] == '\r' ? '\n' : source[i];
            i += pair ? 1 : 0;
        }
        if (source_.ends_with('\n')) {
            source_.pop_back();
        }
    }

    std::vector<Token> run() {
        while (at_ < source_.size()) {
            data();
            if (at_ < source_.size()) {
                tag();
            }
        }
        add(Kind::End, "");
        return std::move(tokens_);
    }

private:
    void add(Kind kind, std::string text) { tokens_.push_back({kind, std::move(text), line_}); }
    bool follows(std::string_view text) const {
        return std::string_view(source_).substr(at_).starts_with(text);
    }
    void advance(std::size_t bytes) {
        line_ += static_cast<int>(
            std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                       source_.begin() + static_cast<std::ptrdiff_t>(at_ + bytes), '\n'));
        at_ += bytes;
    }

    /// Up to the next tag, with the white space that the tags around it leave.
    void data() {
        std::size_t end = at_;
        while (end < source_.size() &&
               !(source_[end] == '{' && end + 1 < source_.size() &&
                 std::string_view("{%#").find(source_[end + 1]) != std::string::npos)) {
            ++end;
        }
        std::string text = source_.substr(at_, end - at_);
        if (strip_after_) {
            text.erase(0, static_cast<std::size_t>(
                              std::find_if_not(text.begin(), text.end(), is_space) - text.begin()));
        } else if (trim_newline_ && text.starts_with('\n')) {
            text.erase(0, 1);
        }
        if (end < source_.size()) {
            const char mark = end + 2 < source_.size() ? source_[end + 2] : ' ';
            if (mark == '-') {
                while (!text.empty() && is_space(text.back())) {
                    text.pop_back();
                }
            } else if (mark != '+' && source_[end + 1] != '{') {
                // Blanks before a block on a line of its own. A line begins where the source's
                // does.
                std::size_t blank = text.size();
                while (blank > 0 && is_space(text[blank - 1]) && text[blank - 1] != '\n') {
                    --blank;
                }
                const bool line_begins =
                    blank > 0 ? text[blank - 1] == '\n'
                              : end == text.size() || source_[end - text.size() - 1] == '\n';
                if (line_begins) {
                    text.erase(blank);
                }
            }
        }
        if (!text.empty()) {
            add(Kind::Data, text);
        }
        advance(end - at_);
    }

    void tag() {
        const char kind = source_[at_ + 1];
        if (kind == '#') {
            comment();
            return;
        }
        add(kind == '{' ? Kind::PrintBegin : Kind::BlockBegin, "");
        advance(2);
        if (follows("-") || follows("+")) {
            advance(1);
        }
        const std::string close = kind == '{' ? "}}" : "%}";
        const Kind end = kind == '{' ? Kind::PrintEnd : Kind::BlockEnd;
        std::string open;
        for (;;) {
            while (at_ < source_.size() && is_space(source_[at_])) {
                advance(1);
            }
            if (at_ == source_.size()) {
                refuse(line_, "a tag has no end");
            }
            const bool strip = open.empty() && follows("-" + close);
            const bool keep = open.empty() && kind == '%' && follows("+" + close);
            if (strip || keep || (open.empty() && follows(close))) {
                advance(close.size() + (strip || keep ? 1 : 0));
                strip_after_ = strip;
                trim_newline_ = kind == '%' && !keep;
                add(end, "");
                return;
            }
            word(open);
        }
    }

    void comment() {
        const std::size_t end = source_.find("#}", at_ + 2);
        if (end == std::string::npos) {
            refuse(line_, "a comment has no end");
        }
        strip_after_ = source_[end - 1] == '-' && end > at_ + 2;
        trim_newline_ = source_[end - 1] != '+';
        advance(end + 2 - at_);
    }

    /// open: the brackets that are open.
    void word(std::string& open) {
        constexpr std::array kOperators = {"==", "!=", "<=", ">=", "//", "**"};
        const char c = source_[at_];
        if (is_name(c)) {
            take(Kind::Name, [](char d) { return is_name(d) || is_digit(d); });
        } else if (is_digit(c)) {
            number();
        } else if (c == '"' || c == '\'') {
            string(c);
        } else {
            for (const char* known : kOperators) {
                if (follows(known)) {
                    add(Kind::Operator, known);
                    advance(2);
                    return;
                }
            }
            if (std::string_view("+-*/%~<>=.,:|()[]{}").find(c) == std::string::npos) {
                refuse(line_, "the character " + in_quotes({&c, 1}));
            }
            if (c == '(' || c == '[' || c == '{') {
                open += c;
            } else if ((c == ')' || c == ']' || c == '}') && !open.empty()) {
                open.pop_back();
            }
            add(Kind::Operator, std::string(1, c));
            advance(1);
        }
    }

    template <class Belongs>
    void take(Kind kind, Belongs&& belongs) {
        std::size_t end = at_;
        while (end < source_.size() && belongs(source_[end])) {
            ++end;
        }
        add(kind, source_.substr(at_, end - at_));
        advance(end - at_);
    }

    void number() {
        take(Kind::Integer, is_digit);
        if (follows(".") && at_ + 1 < source_.size() && is_digit(source_[at_ + 1])) {
            std::string whole = std::move(tokens_.back().text);
            tokens_.pop_back();
            advance(1);
            take(Kind::Float, is_digit);
            tokens_.back().text = whole + "." + tokens_.back().text;
        }
    }

    void string(char quote) {
        const int line = line_;
        std::string text;
        advance(1);
        for (;; advance(1)) {
            if (at_ == source_.size()) {
                refuse(line, "a string has no end");
            }
            char c = source_[at_];
            if (c == quote) {
                break;
            }
            if (c == '\\' && at_ + 1 < source_.size()) {
                advance(1);
                c = source_[at_];
                if (const std::size_t known = std::string_view("nrt0").find(c);
                    known != std::string::npos) {
                    c = std::string_view("\n\r\t\0", 4)[known];
                } else if (c == 'u' || c == 'x') {
                    code_point(text);
                    continue;
                } else if (std::string_view("\\'\"\n").find(c) == std::string::npos) {
                    text += '\\'; // as Python keeps it
                }
            }
            text += c;
        }
        tokens_.push_back({Kind::String, text, line});
        advance(1);
    }

    void code_point(std::string& text) {
        const std::size_t digits = source_[at_] == 'u' ? 4 : 2;
        const std::string hex = source_.substr(at_ + 1, digits);
        if (hex.size() != digits ||
            hex.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) {
            refuse(line_, "an escape without its digits");
        }
        const unsigned long code = std::stoul(hex, nullptr, 16);
        if (code >= 0xd800 && code < 0xe000) {
            refuse(line_, "half a surrogate pair");
        }
        append_utf8(text, static_cast<char32_t>(code));
        advance(digits);
    }

    std::string source_;
    std::size_t at_ = 0;
    int line_ = 1;
    bool strip_after_ = false, trim_newline_ = false;
    std::vector<Token> tokens_;
};

} // namespace

std::vector<Token> tokens_of(std::string_view source) {
    return Lexer(source).run();
}

void refuse(int line, const std::string& why) {
    throw Error(ErrorCode::Unsupported,
                "line " + std::to_string(line) + " of the chat template is not supported: " + why);
}

} // namespace bellows::text::jinja
