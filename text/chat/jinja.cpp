// SPDX-License-Identifier: MIT
#include "jinja.hpp"

#include "jinja_functions.hpp"
#include "jinja_lexer.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/printable.hpp>

#include <map>

namespace bellows::text::jinja {

void Limits::step(int line) {
    constexpr std::uint64_t kMost = 5'000'000;
    if (++steps_ > kMost) {
        refuse(line, "the template takes more than " + std::to_string(kMost) + " steps");
    }
}

void Limits::bytes(std::size_t count, int line) {
    constexpr std::uint64_t kMost = std::uint64_t{256} << 20;
    bytes_ += count;
    if (bytes_ > kMost) {
        refuse(line, "the template makes more than 256 MiB of text");
    }
}

void Limits::enter_call(int line) {
    constexpr int kDeepest = 20;
    if (++calls_ > kDeepest) {
        --calls_;
        refuse(line, "macros call each other more than " + std::to_string(kDeepest) + " deep");
    }
}

namespace {

using Scope = std::map<std::string, Value, std::less<>>;
enum class Flow : std::uint8_t { On, Break, Continue };

class Run {
public:
    explicit Run(const std::vector<std::pair<std::string, Value>>& globals) : scopes_(1) {
        for (const char* name : {"raise_exception", "namespace", "range", "dict"}) {
            scopes_[0][name] = Value(Function{name});
        }
        for (const auto& [name, value] : globals) {
            scopes_[0][name] = value;
        }
    }

    MarkedText text(const Body& body) {
        MarkedText out;
        (void)run(body, out);
        return out;
    }

private:
    using E = Expression::Kind;
    using S = Statement::Kind;

    Context at(int line) { return {limits_, line}; }

    Flow run(const Body& body, MarkedText& out) {
        for (const Statement& statement : body) {
            limits_.step(statement.line);
            const Flow flow = run(statement, out);
            if (flow != Flow::On) {
                return flow;
            }
        }
        return Flow::On;
    }

    void write(const MarkedText& text, int line, MarkedText& out) {
        limits_.bytes(2 * text.text.size(), line);
        out.append(text);
    }

    Flow run(const Statement& statement, MarkedText& out) {
        switch (statement.kind) {
        case S::Data:
            write(statement.data, statement.line, out);
            break;
        case S::Print:
            write(printed(value(statement.value), at(statement.line)), statement.line, out);
            break;
        case S::If:
            return run(value(statement.value).truth() ? statement.body : statement.otherwise, out);
        case S::For:
            return loop(statement, out);
        case S::Set:
            assign(statement);
            break;
        case S::Define:
            scopes_.back()[statement.macro->name] =
                Value(static_cast<const Macro*>(statement.macro.get()));
            break;
        case S::Break:
            return Flow::Break;
        case S::Continue:
            return Flow::Continue;
        }
        return Flow::On;
    }

    void assign(const Statement& statement) {
        Value made;
        if (statement.value) {
            made = value(statement.value);
        } else {
            scopes_.emplace_back();
            MarkedText inner;
            (void)run(statement.body, inner);
            scopes_.pop_back();
            made = Value::text(std::move(inner));
        }
        if (statement.names.size() == 1) {
            scopes_.back()[statement.names[0]] = std::move(made);
            return;
        }
        const Value target = look_up(statement.names[0]);
        const auto* dict = target.as_dict();
        if (dict == nullptr || !(*dict)->is_namespace) {
            refuse(statement.line, in_quotes(statement.names[0]) + " is no namespace");
        }
        check_nesting(made, false, statement.line);
        (*dict)->set(statement.names[1], std::move(made));
    }

    /// A namespace that holds itself would never be freed, nor a value that is nested deeply be
    /// freed on a bounded stack.
    void check_nesting(const Value& made, bool namespaces, int line, int depth = 0) {
        constexpr int kDeepest = 32;
        limits_.step(line);
        if (depth > kDeepest) {
            refuse(line, "values that are nested too deeply");
        }
        if (const auto* dict = made.as_dict()) {
            if ((*dict)->is_namespace) {
                if (!namespaces) {
                    refuse(line, "a namespace inside a namespace");
                }
                return;
            }
            for (const auto& [key, entry] : (*dict)->entries) {
                check_nesting(entry, namespaces, line, depth + 1);
            }
        } else if (const List* list = made.as_list()) {
            for (const Value& entry : *list) {
                check_nesting(entry, namespaces, line, depth + 1);
            }
        }
    }

    void bind(const Statement& loop, const Value& item) {
        Scope& scope = scopes_.back();
        if (loop.names.size() == 1) {
            scope[loop.names[0]] = item;
            return;
        }
        const List parts = items_of(item, at(loop.line));
        if (parts.size() != loop.names.size()) {
            refuse(loop.line, std::to_string(parts.size()) + " values for " +
                                  std::to_string(loop.names.size()) + " names");
        }
        for (std::size_t i = 0; i < parts.size(); ++i) {
            scope[loop.names[i]] = parts[i];
        }
    }

    Flow loop(const Statement& statement, MarkedText& out) {
        List items = items_of(value(statement.value), at(statement.line));
        scopes_.emplace_back();
        if (statement.condition) {
            List chosen;
            for (const Value& item : items) {
                limits_.step(statement.line);
                bind(statement, item);
                if (value(statement.condition).truth()) {
                    chosen.push_back(item);
                }
            }
            items = std::move(chosen);
        }
        const auto count = static_cast<std::int64_t>(items.size());
        bool finished = false; // one turn, to its end: as Jinja has it
        for (std::int64_t i = 0; i < count; ++i) {
            limits_.step(statement.line);
            scopes_.back().clear();
            const auto place = static_cast<std::size_t>(i);
            auto state = std::make_shared<Dict>();
            state->entries = {{"index0", Value(i)},
                              {"index", Value(i + 1)},
                              {"first", Value(i == 0)},
                              {"last", Value(i + 1 == count)},
                              {"length", Value(count)},
                              {"revindex", Value(count - i)},
                              {"revindex0", Value(count - i - 1)},
                              {"previtem", i == 0 ? Value() : items[place - 1]},
                              {"nextitem", i + 1 == count ? Value() : items[place + 1]}};
            scopes_.back()["loop"] = Value(std::move(state));
            bind(statement, items[place]);
            const Flow flow = run(statement.body, out);
            finished = finished || flow == Flow::On;
            if (flow == Flow::Break) {
                break;
            }
        }
        scopes_.pop_back();
        return finished ? Flow::On : run(statement.otherwise, out);
    }

    Value look_up(std::string_view name) const {
        for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
            if (const auto found = scope->find(name); found != scope->end()) {
                return found->second;
            }
        }
        return Value();
    }

    Value nested(Value made, int line) {
        check_nesting(made, true, line);
        return made;
    }

    Value value(const ExpressionPtr& expression) {
        return expression ? value(*expression) : Value();
    }

    Value value(const Expression& e) {
        limits_.step(e.line);
        switch (e.kind) {
        case E::Literal:
            return e.value;
        case E::Name:
            return look_up(e.name);
        case E::Sequence: {
            List items;
            for (const ExpressionPtr& child : e.children) {
                items.push_back(value(child));
            }
            return nested(Value::list(std::move(items)), e.line);
        }
        case E::Mapping: {
            auto dict = std::make_shared<Dict>();
            for (std::size_t i = 0; i + 1 < e.children.size(); i += 2) {
                dict->set(text_of(value(e.children[i]), at(e.line)).text, value(e.children[i + 1]));
            }
            return nested(Value(std::move(dict)), e.line);
        }
        case E::Attribute:
            return index(value(e.children[0]), Value::text(MarkedText::of_template(e.name)),
                         at(e.line));
        case E::Index:
            return index(value(e.children[0]), value(e.children[1]), at(e.line));
        case E::Slice:
            return slice(value(e.children[0]), value(e.children[1]), value(e.children[2]),
                         value(e.children[3]), at(e.line));
        case E::Call:
            return call(e);
        case E::Filter:
            return filter(e.name, value(e.children[0]), arguments(e), at(e.line));
        case E::Test:
            return Value(test(e.name, value(e.children[0]), arguments(e), at(e.line)));
        case E::Unary: {
            const Value child = value(e.children[0]);
            return e.name == "not" ? Value(!child.truth())
                                   : binary(e.name, Value(std::int64_t{0}), child, at(e.line));
        }
        case E::Binary: {
            Value left = value(e.children[0]);
            if (e.name == "and" || e.name == "or") {
                return left.truth() == (e.name == "or") ? left : value(e.children[1]);
            }
            return binary(e.name, left, value(e.children[1]), at(e.line));
        }
        case E::Conditional:
            return value(e.children[0]).truth() ? value(e.children[1]) : value(e.children[2]);
        }
        return Value();
    }

    Arguments arguments(const Expression& e) {
        Arguments out;
        for (std::size_t i = 1; i < e.children.size(); ++i) {
            out.values.push_back(value(e.children[i]));
        }
        for (const auto& [name, child] : e.named) {
            out.named.emplace_back(name, value(child));
        }
        return out;
    }

    Value call(const Expression& e) {
        const Expression& callee = *e.children[0];
        if (callee.kind == E::Attribute) {
            const Value self = value(callee.children[0]);
            Value result;
            if (method(callee.name, self, arguments(e), at(e.line), result)) {
                return result;
            }
            refuse(e.line, "the method " + in_quotes(callee.name) + " of " + kind_of(self));
        }
        const Value function = value(callee);
        if (const auto* macro = std::get_if<const Macro*>(&function.as)) {
            return call(**macro, arguments(e), e.line);
        }
        if (const auto* own = std::get_if<Function>(&function.as)) {
            return call(own->name, arguments(e), e.line);
        }
        refuse(e.line, callee.kind == E::Name ? "the function " + in_quotes(callee.name)
                                              : "a call of what is no function");
    }

    Value call(const Macro& macro, const Arguments& given, int line) {
        limits_.enter_call(line);
        std::vector<Scope> outer(1);
        outer.swap(scopes_);
        scopes_[0] = outer[0]; // a macro sees what is global
        scopes_.emplace_back();
        for (std::size_t i = 0; i < macro.parameters.size(); ++i) {
            const auto& [name, otherwise] = macro.parameters[i];
            Value argument = given.get(i, name);
            scopes_.back()[name] = argument.is<Undefined>() ? value(otherwise) : argument;
        }
        MarkedText out;
        (void)run(macro.body, out);
        scopes_ = std::move(outer);
        limits_.leave_call();
        return Value::text(std::move(out));
    }

    Value call(const std::string& name, const Arguments& given, int line) {
        if (name == "raise_exception") {
            throw Error(ErrorCode::InvalidArgument,
                        "the chat template refuses the messages: " +
                            bounded(printed(given.get(0, "message"), at(line)).text));
        }
        if (name == "range") {
            constexpr std::int64_t kMost = 100'000;
            const bool two = given.values.size() > 1;
            const std::int64_t first = two ? integer(given.values[0], at(line)) : 0;
            const std::int64_t end = integer(given.get(two ? 1 : 0, ""), at(line));
            if (given.values.size() > 2 || first < -kMost || end > kMost) {
                refuse(line, "this range");
            }
            List items;
            for (std::int64_t i = first; i < end; ++i) {
                items.push_back(Value(i));
            }
            limits_.bytes(items.size() * sizeof(Value), line);
            return Value::list(std::move(items));
        }
        auto made = std::make_shared<Dict>();
        for (const auto& [key, entry] : given.named) {
            check_nesting(entry, false, line);
            made->set(key, entry);
        }
        made->is_namespace = name == "namespace";
        return Value(std::move(made));
    }

    std::vector<Scope> scopes_;
    Limits limits_;
};

} // namespace

MarkedText Template::render(const std::vector<std::pair<std::string, Value>>& globals) const {
    return Run(globals).text(body_);
}

} // namespace bellows::text::jinja
