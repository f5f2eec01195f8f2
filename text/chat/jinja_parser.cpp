// SPDX-License-Identifier: MIT
#include "jinja_expressions.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <initializer_list>
#include <utility>

namespace bellows::text::jinja {

namespace {

using TokenKind = Token::Kind;
using Kind = Statement::Kind;

class Parser {
public:
    explicit Parser(std::string_view source) : in_(tokens_of(source)) {}

    Body run() {
        Body body = until({});
        return body;
    }

private:
    Statement make(Kind kind) {
        Statement made;
        made.kind = kind;
        made.line = in_.next().line;
        return made;
    }
    void end_block() { in_.expect(TokenKind::BlockEnd, ""); }

    /// Up to one of these blocks, whose name has then been taken; up to the end, if none is named.
    Body until(std::initializer_list<std::string_view> ends) {
        const ExpressionParser::Depth depth(in_);
        Body body;
        for (;;) {
            if (in_.next().kind == TokenKind::End) {
                if (ends.size() != 0) {
                    refuse(in_.next().line, in_quotes(*ends.begin()) + " is missing");
                }
                return body;
            }
            const Token token = in_.take();
            if (token.kind == TokenKind::Data) {
                Statement data = make(Kind::Data);
                data.data = MarkedText::of_template(token.text);
                body.push_back(std::move(data));
            } else if (token.kind == TokenKind::PrintBegin) {
                Statement print = make(Kind::Print);
                print.value = in_.expression_or_list();
                in_.expect(TokenKind::PrintEnd, "");
                body.push_back(std::move(print));
            } else {
                const std::string name = in_.name();
                if (std::find(ends.begin(), ends.end(), name) != ends.end()) {
                    ended_by_ = name;
                    return body;
                }
                block(name, body);
            }
        }
    }

    void block(const std::string& name, Body& body) {
        if (name == "if") {
            body.push_back(conditional());
        } else if (name == "for") {
            body.push_back(loop());
        } else if (name == "set") {
            body.push_back(assignment());
        } else if (name == "macro") {
            body.push_back(macro());
        } else if (name == "break" || name == "continue") {
            if (loops_ == 0) {
                refuse(in_.next().line, in_quotes(name) + " outside of a loop");
            }
            body.push_back(make(name == "break" ? Kind::Break : Kind::Continue));
            end_block();
        } else if (name == "generation") { // marks what is trained on
            end_block();
            for (Statement& statement : until({"endgeneration"})) {
                body.push_back(std::move(statement));
            }
            end_block();
        } else {
            refuse(in_.next().line, "the block " + in_quotes(name));
        }
    }

    Statement conditional() {
        const ExpressionParser::Depth depth(in_);
        Statement made = make(Kind::If);
        made.value = in_.expression();
        end_block();
        made.body = until({"endif", "elif", "else"});
        if (ended_by_ == "elif") {
            made.otherwise.push_back(conditional());
            return made; // its "endif" serves both
        }
        if (ended_by_ == "else") {
            end_block();
            made.otherwise = until({"endif"});
        }
        end_block();
        return made;
    }

    Statement loop() {
        Statement made = make(Kind::For);
        do {
            made.names.push_back(in_.name());
        } while (in_.accept_operator(","));
        in_.expect(TokenKind::Name, "in");
        made.value = in_.without_condition();
        if (in_.accept_name("if")) {
            made.condition = in_.expression();
        }
        if (in_.accept_name("recursive")) {
            refuse(made.line, "a recursive loop");
        }
        end_block();
        ++loops_;
        made.body = until({"endfor", "else"});
        --loops_;
        if (ended_by_ == "else") {
            end_block();
            made.otherwise = until({"endfor"});
        }
        end_block();
        return made;
    }

    Statement assignment() {
        Statement made = make(Kind::Set);
        made.names.push_back(in_.name());
        if (in_.accept_operator(".")) {
            made.names.push_back(in_.name());
        } else if (in_.next().text == ",") {
            refuse(made.line, "several names of one \"set\"");
        }
        if (in_.accept_operator("=")) {
            made.value = in_.expression_or_list();
        } else {
            end_block();
            made.body = until({"endset"});
        }
        end_block();
        return made;
    }

    Statement macro() {
        Statement made = make(Kind::Define);
        made.macro = std::make_shared<Macro>();
        made.macro->name = in_.name();
        in_.expect(TokenKind::Operator, "(");
        while (!in_.accept_operator(")")) {
            std::string name = in_.name();
            made.macro->parameters.emplace_back(
                std::move(name), in_.accept_operator("=") ? in_.expression() : nullptr);
            if (!in_.accept_operator(",") && !in_.is(TokenKind::Operator, ")")) {
                in_.expect(TokenKind::Operator, ")");
            }
        }
        end_block();
        const int loops = std::exchange(loops_, 0);
        made.macro->body = until({"endmacro"});
        loops_ = loops;
        end_block();
        return made;
    }

    ExpressionParser in_;
    std::string ended_by_;
    int loops_ = 0;
};

} // namespace

Body parse(std::string_view source) {
    return Parser(source).run();
}

} // namespace bellows::text::jinja
