// SPDX-License-Identifier: MIT
#pragma once

// Parses the expressions of a template.

#include "jinja_ast.hpp"
#include "jinja_lexer.hpp"

#include <string_view>
#include <vector>

namespace bellows::text::jinja {

class ExpressionParser {
public:
    explicit ExpressionParser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

    ExpressionPtr expression();
    /// Without "if", which ends it.
    ExpressionPtr without_condition() { return disjunction(); }
    /// Also "a, b", a list.
    ExpressionPtr expression_or_list();

    const Token& next() const noexcept { return tokens_[at_]; }
    Token take();
    bool is(Token::Kind kind, std::string_view text) const noexcept;
    /// Takes the token if it is that.
    bool accept(Token::Kind kind, std::string_view text);
    bool accept_operator(std::string_view text) { return accept(Token::Kind::Operator, text); }
    bool accept_name(std::string_view text) { return accept(Token::Kind::Name, text); }
    void expect(Token::Kind kind, std::string_view text);
    std::string name();

    /// Counts how deep things are nested.
    class Depth {
    public:
        explicit Depth(ExpressionParser& parser);
        ~Depth() { --*depth_; }
        Depth(const Depth&) = delete;
        Depth& operator=(const Depth&) = delete;

    private:
        int* depth_;
    };

private:
    ExpressionPtr make(Expression::Kind kind, std::string text = "");
    ExpressionPtr binary(std::string text, ExpressionPtr left, ExpressionPtr right);
    ExpressionPtr disjunction();
    ExpressionPtr conjunction();
    ExpressionPtr negation();
    ExpressionPtr comparison();
    ExpressionPtr sum();
    ExpressionPtr concatenation();
    ExpressionPtr product();
    ExpressionPtr unary(bool with_filters);
    ExpressionPtr primary();
    ExpressionPtr postfix(ExpressionPtr value, bool with_filters);
    ExpressionPtr subscript(ExpressionPtr value);
    ExpressionPtr test(ExpressionPtr value);
    void arguments(Expression& call);

    std::vector<Token> tokens_;
    std::size_t at_ = 0;
    int depth_ = 0;
};

} // namespace bellows::text::jinja
