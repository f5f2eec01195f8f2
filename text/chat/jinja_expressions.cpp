// SPDX-License-Identifier: MIT
#include "jinja_expressions.hpp"

#include <bellows/base/error.hpp>

#include <array>
#include <charconv>
#include <cstdlib>

namespace bellows::text::jinja {

namespace {

using TokenKind = Token::Kind;
using Kind = Expression::Kind;

constexpr int kDeepest = 100;

std::string shown(const Token& token) {
    return token.kind == TokenKind::End        ? "its end"
           : token.kind == TokenKind::BlockEnd ? "\"%}\""
           : token.kind == TokenKind::PrintEnd ? "\"}}\""
           : token.kind == TokenKind::Data     ? "text"
                                               : in_quotes(token.text);
}

} // namespace

ExpressionParser::Depth::Depth(ExpressionParser& parser) : depth_(&parser.depth_) {
    if (++*depth_ > kDeepest) {
        --*depth_;
        refuse(parser.next().line, "it is nested too deeply");
    }
}

Token ExpressionParser::take() {
    Token token = tokens_[at_];
    if (token.kind != TokenKind::End) {
        ++at_;
    }
    return token;
}

bool ExpressionParser::is(TokenKind kind, std::string_view text) const noexcept {
    return next().kind == kind && next().text == text;
}

bool ExpressionParser::accept(TokenKind kind, std::string_view text) {
    if (!is(kind, text)) {
        return false;
    }
    take();
    return true;
}

void ExpressionParser::expect(TokenKind kind, std::string_view text) {
    if (!accept(kind, text)) {
        refuse(next().line, shown(next()) + " stands where " +
                                (text.empty() ? "a tag should end" : in_quotes(text) + " should"));
    }
}

std::string ExpressionParser::name() {
    if (next().kind != TokenKind::Name) {
        refuse(next().line, shown(next()) + " stands where a name should");
    }
    return take().text;
}

ExpressionPtr ExpressionParser::make(Kind kind, std::string text) {
    return std::make_unique<Expression>(Expression{kind, next().line, std::move(text), {}, {}, {}});
}

ExpressionPtr ExpressionParser::binary(std::string text, ExpressionPtr left, ExpressionPtr right) {
    ExpressionPtr made = make(Kind::Binary, std::move(text));
    made->children.push_back(std::move(left));
    made->children.push_back(std::move(right));
    return made;
}

ExpressionPtr ExpressionParser::expression() {
    const Depth depth(*this);
    ExpressionPtr value = disjunction();
    while (accept_name("if")) {
        ExpressionPtr made = make(Kind::Conditional);
        made->children.push_back(disjunction());
        made->children.push_back(std::move(value));
        made->children.push_back(accept_name("else") ? expression() : nullptr);
        value = std::move(made);
    }
    return value;
}

ExpressionPtr ExpressionParser::expression_or_list() {
    ExpressionPtr first = expression();
    if (!is(TokenKind::Operator, ",")) {
        return first;
    }
    ExpressionPtr list = make(Kind::Sequence);
    list->children.push_back(std::move(first));
    while (accept_operator(",")) {
        list->children.push_back(expression());
    }
    return list;
}

ExpressionPtr ExpressionParser::disjunction() {
    ExpressionPtr value = conjunction();
    while (accept_name("or")) {
        value = binary("or", std::move(value), conjunction());
    }
    return value;
}

ExpressionPtr ExpressionParser::conjunction() {
    ExpressionPtr value = negation();
    while (accept_name("and")) {
        value = binary("and", std::move(value), negation());
    }
    return value;
}

ExpressionPtr ExpressionParser::negation() {
    const Depth depth(*this);
    if (accept_name("not")) {
        ExpressionPtr made = make(Kind::Unary, "not");
        made->children.push_back(negation());
        return made;
    }
    return comparison();
}

ExpressionPtr ExpressionParser::comparison() {
    constexpr std::array kComparisons = {"==", "!=", "<", ">", "<=", ">="};
    ExpressionPtr value = sum();
    for (bool compared = false;; compared = true) {
        std::string found;
        for (const char* known : kComparisons) {
            if (is(TokenKind::Operator, known)) {
                found = take().text;
                break;
            }
        }
        if (found.empty() && accept_name("in")) {
            found = "in";
        }
        if (found.empty() && is(TokenKind::Name, "not") && tokens_[at_ + 1].text == "in") {
            take();
            take();
            found = "not in";
        }
        if (found.empty()) {
            return value;
        }
        if (compared) {
            refuse(next().line, "comparisons in a chain");
        }
        value = binary(found, std::move(value), sum());
    }
}

ExpressionPtr ExpressionParser::sum() {
    ExpressionPtr value = concatenation();
    while (is(TokenKind::Operator, "+") || is(TokenKind::Operator, "-")) {
        const std::string found = take().text;
        value = binary(found, std::move(value), concatenation());
    }
    return value;
}

ExpressionPtr ExpressionParser::concatenation() {
    ExpressionPtr value = product();
    while (accept_operator("~")) {
        value = binary("~", std::move(value), product());
    }
    return value;
}

ExpressionPtr ExpressionParser::product() {
    ExpressionPtr value = unary(true);
    for (;;) {
        if (!is(TokenKind::Operator, "*") && !is(TokenKind::Operator, "/") &&
            !is(TokenKind::Operator, "//") && !is(TokenKind::Operator, "%")) {
            return value;
        }
        const std::string found = take().text;
        value = binary(found, std::move(value), unary(true));
    }
}

ExpressionPtr ExpressionParser::unary(bool with_filters) {
    const Depth depth(*this);
    if (is(TokenKind::Operator, "-") || is(TokenKind::Operator, "+")) {
        ExpressionPtr made = make(Kind::Unary, take().text);
        made->children.push_back(unary(false));
        return postfix(std::move(made), with_filters);
    }
    return postfix(primary(), with_filters);
}

ExpressionPtr ExpressionParser::primary() {
    const Token token = take();
    ExpressionPtr made = make(Kind::Literal);
    made->line = token.line;
    if (token.kind == TokenKind::String) {
        std::string text = token.text;
        while (next().kind == TokenKind::String) { // side by side
            text += take().text;
        }
        made->value = Value::text(MarkedText::of_template(text));
    } else if (token.kind == TokenKind::Integer) {
        std::int64_t number = 0;
        const char* last = token.text.data() + token.text.size();
        if (std::from_chars(token.text.data(), last, number).ec != std::errc()) {
            refuse(token.line, "the number " + in_quotes(token.text));
        }
        made->value = Value(number);
    } else if (token.kind == TokenKind::Float) {
        made->value = Value(std::strtod(token.text.c_str(), nullptr));
    } else if (token.kind == TokenKind::Name) {
        if (token.text == "true" || token.text == "True") {
            made->value = Value(true);
        } else if (token.text == "false" || token.text == "False") {
            made->value = Value(false);
        } else if (token.text == "none" || token.text == "None") {
            made->value = Value(None());
        } else {
            made->kind = Kind::Name;
            made->name = token.text;
        }
    } else if (token.kind == TokenKind::Operator && (token.text == "[" || token.text == "(")) {
        const std::string close = token.text == "[" ? "]" : ")";
        made->kind = Kind::Sequence;
        bool comma = token.text == "[";
        while (!accept_operator(close)) {
            made->children.push_back(expression());
            if (accept_operator(",")) {
                comma = true;
            } else if (!is(TokenKind::Operator, close)) {
                expect(TokenKind::Operator, close);
            }
        }
        if (!comma && made->children.size() == 1) { // brackets around an expression
            return std::move(made->children[0]);
        }
    } else if (token.kind == TokenKind::Operator && token.text == "{") {
        made->kind = Kind::Mapping;
        while (!accept_operator("}")) {
            made->children.push_back(expression());
            expect(TokenKind::Operator, ":");
            made->children.push_back(expression());
            if (!accept_operator(",") && !is(TokenKind::Operator, "}")) {
                expect(TokenKind::Operator, "}");
            }
        }
    } else {
        refuse(token.line, shown(token) + " stands where a value should");
    }
    return made;
}

ExpressionPtr ExpressionParser::postfix(ExpressionPtr value, bool with_filters) {
    constexpr int kMost = 100;
    for (int count = 0;; ++count) {
        if (count > kMost) { // they nest
            refuse(next().line, "more than " + std::to_string(kMost) + " steps in one value");
        }
        if (accept_operator(".")) {
            ExpressionPtr made = make(Kind::Attribute, name());
            made->children.push_back(std::move(value));
            value = std::move(made);
        } else if (accept_operator("[")) {
            value = subscript(std::move(value));
        } else if (accept_operator("(")) {
            ExpressionPtr made = make(Kind::Call);
            made->children.push_back(std::move(value));
            arguments(*made);
            value = std::move(made);
        } else if (with_filters && accept_operator("|")) {
            ExpressionPtr made = make(Kind::Filter, name());
            made->children.push_back(std::move(value));
            if (accept_operator("(")) {
                arguments(*made);
            }
            value = std::move(made);
        } else if (with_filters && accept_name("is")) {
            value = test(std::move(value));
        } else {
            return value;
        }
    }
}

ExpressionPtr ExpressionParser::subscript(ExpressionPtr value) {
    ExpressionPtr made = make(Kind::Slice);
    made->children.push_back(std::move(value));
    const auto at_end = [&] {
        return is(TokenKind::Operator, "]") || is(TokenKind::Operator, ":");
    };
    ExpressionPtr first = at_end() ? nullptr : expression();
    if (first && accept_operator("]")) {
        made->kind = Kind::Index;
        made->children.push_back(std::move(first));
        return made;
    }
    expect(TokenKind::Operator, ":");
    made->children.push_back(std::move(first));
    made->children.push_back(at_end() ? nullptr : expression());
    made->children.push_back(accept_operator(":") && !at_end() ? expression() : nullptr);
    expect(TokenKind::Operator, "]");
    return made;
}

ExpressionPtr ExpressionParser::test(ExpressionPtr value) {
    const bool negated = accept_name("not");
    ExpressionPtr made = make(Kind::Test, name());
    made->children.push_back(std::move(value));
    if (accept_operator("(")) {
        arguments(*made);
    } else if (next().kind == TokenKind::String || next().kind == TokenKind::Integer) {
        made->children.push_back(primary());
    }
    if (!negated) {
        return made;
    }
    ExpressionPtr inverse = make(Kind::Unary, "not");
    inverse->children.push_back(std::move(made));
    return inverse;
}

void ExpressionParser::arguments(Expression& call) {
    while (!accept_operator(")")) {
        if (next().kind == TokenKind::Name && tokens_[at_ + 1].text == "=" &&
            tokens_[at_ + 1].kind == TokenKind::Operator) {
            std::string key = name();
            take();
            call.named.emplace_back(std::move(key), expression());
        } else {
            call.children.push_back(expression());
        }
        if (!accept_operator(",") && !is(TokenKind::Operator, ")")) {
            expect(TokenKind::Operator, ")");
        }
    }
}

} // namespace bellows::text::jinja
