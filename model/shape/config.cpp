// SPDX-License-Identifier: MIT
#include <bellows/shape/config.hpp>

#include <bellows/base/error.hpp>
#include <bellows/base/printable.hpp>

#include <toml++/toml.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <sstream>
#include <variant>

namespace bellows {
namespace {

// One row per key: the table drives reading, checking and writing.
struct Field {
    using Member = std::variant<std::uint64_t ModelConfig::*, double ModelConfig::*,
                                bool ModelConfig::*, ScoreFunction ModelConfig::*>;
    const char* name;
    Member member;
    bool required = false;
    double min = 0; ///< numbers lie in [min, max]
    double max = 0;
    std::uint64_t multiple = 1; ///< 8 for what kernels read in 16-byte pieces
};

// The upper limits keep every parameter count below 2^64.
constexpr double kMaxSize = 1048576;
using C = ModelConfig;
const Field kFields[] = {
    {"vocabulary", &C::vocabulary, true, 8, 16777216, 8},
    {"hidden", &C::hidden, true, 8, kMaxSize, 8},
    {"layers", &C::layers, true, 1, 1024},
    {"dense_layers", &C::dense_layers, true, 0, 1024},
    {"heads", &C::heads, true, 1, 4096},
    {"q_lora_rank", &C::q_lora_rank, false, 0, kMaxSize, 8},
    {"kv_lora_rank", &C::kv_lora_rank, true, 8, kMaxSize, 8},
    {"qk_nope_head_dim", &C::qk_nope_head_dim, true, 8, 1024, 8},
    {"qk_rope_head_dim", &C::qk_rope_head_dim, true, 8, 1024, 8},
    {"v_head_dim", &C::v_head_dim, true, 8, 1024, 8},
    {"rope_theta", &C::rope_theta, false, 1, 1e12},
    {"dense_ffn", &C::dense_ffn, false, 0, kMaxSize, 8},
    {"moe_ffn", &C::moe_ffn, false, 0, kMaxSize, 8},
    {"routed_experts", &C::routed_experts, false, 0, 4096},
    {"shared_experts", &C::shared_experts, false, 0, 64},
    {"top_k", &C::top_k, false, 0, 64},
    {"n_group", &C::n_group, false, 1, 4096},
    {"topk_group", &C::topk_group, false, 1, 4096},
    {"score_function", &C::score_function},
    {"normalize_top_k", &C::normalize_top_k},
    {"route_scale", &C::route_scale, false, 1e-6, 1e6},
    {"router_bias", &C::router_bias},
    {"bias_update_rate", &C::bias_update_rate, false, 0, 1},
    {"balance_loss_alpha", &C::balance_loss_alpha, false, 0, 1e6},
    {"norm_eps", &C::norm_eps, false, 1e-12, 1},
    {"tied_embeddings", &C::tied_embeddings},
    {"init_std", &C::init_std, false, 1e-9, 10},
    {"head_init_std", &C::head_init_std, false, 0, 10},
};

/// One line whatever the text held: quoted TOML keys may contain control characters.
[[noreturn]] void refuse(std::string message) {
    for (char& c : message)
        if (static_cast<unsigned char>(c) < ' ')
            c = '?';
    throw Error(ErrorCode::InvalidArgument, std::move(message));
}

/// The shortest text that reads back as the same double and looks like one ("1.0", not "1").
std::string number(double value) {
    std::ostringstream out;
    for (int digits = 6; digits <= std::numeric_limits<double>::max_digits10; ++digits) {
        out.str("");
        out.precision(digits);
        out << value;
        if (std::strtod(out.str().c_str(), nullptr) == value)
            break;
    }
    std::string text = out.str();
    if (text.find_first_of(".en") == std::string::npos)
        text += ".0";
    return text;
}

std::string number(std::uint64_t value) {
    return std::to_string(value);
}

/// Gives "file:line: " for a key, or nothing for a configuration that was not read from a text.
using Locate = std::function<std::string(const char* key)>;

template <class Number>
void check_range(const Field& field, Number value, const Locate& where) {
    const auto as_double = static_cast<double>(value);
    if (!(as_double >= field.min && as_double <= field.max)) {
        const bool whole = std::is_integral_v<Number>;
        const auto bound = [&](double b) {
            return whole ? number(static_cast<std::uint64_t>(b)) : number(b);
        };
        refuse(where(field.name) + field.name + " = " + number(value) + " must lie between " +
               bound(field.min) + " and " + bound(field.max));
    }
}

void check_size(const Field& field, std::uint64_t value, const Locate& where) {
    check_range(field, value, where);
    if (value % field.multiple != 0) {
        const std::uint64_t down = value / field.multiple * field.multiple;
        refuse(where(field.name) + field.name + " = " + number(value) + " must be a multiple of " +
               number(field.multiple) + "; take " +
               (down >= static_cast<std::uint64_t>(std::max(field.min, 1.0)) ? number(down) + " or "
                                                                             : std::string()) +
               number(down + field.multiple));
    }
}

void check_experts(const ModelConfig& c, const Locate& where) {
    const auto positive = [&](const char* name, std::uint64_t value, const char* why) {
        if (value == 0)
            refuse(where(name) + name + " = 0 but " + why);
    };
    if (c.dense_layers > 0)
        positive("dense_ffn", c.dense_ffn, "dense_layers > 0: give the dense FFN's width");
    if (c.moe_layers() == 0)
        return;
    const char* why = "layers > dense_layers: the layers after the dense ones need experts";
    positive("routed_experts", c.routed_experts, why);
    positive("moe_ffn", c.moe_ffn, why);
    positive("top_k", c.top_k, why);
    if (c.routed_experts % c.n_group != 0)
        refuse(where("n_group") + "n_group = " + number(c.n_group) +
               " does not divide routed_experts = " + number(c.routed_experts));
    if (c.topk_group > c.n_group)
        refuse(where("topk_group") + "topk_group = " + number(c.topk_group) +
               " exceeds n_group = " + number(c.n_group));
    const std::uint64_t candidates = c.routed_experts / c.n_group * c.topk_group;
    if (c.top_k > candidates)
        refuse(where("top_k") + "top_k = " + number(c.top_k) + " exceeds the " +
               number(candidates) + " experts of the groups that a token may use (" +
               "routed_experts / n_group * topk_group)");
    if (!c.router_bias && c.bias_update_rate != 0)
        refuse(where("bias_update_rate") + "bias_update_rate = " + number(c.bias_update_rate) +
               " has nothing to update: set it to 0 or router_bias to true");
}

void check(const ModelConfig& config, const Locate& where) {
    for (const Field& field : kFields) {
        if (const auto* size = std::get_if<std::uint64_t C::*>(&field.member))
            check_size(field, config.**size, where);
        else if (const auto* real = std::get_if<double C::*>(&field.member))
            check_range(field, config.**real, where);
    }
    if (config.dense_layers > config.layers)
        refuse(where("dense_layers") + "dense_layers = " + number(config.dense_layers) +
               " exceeds layers = " + number(config.layers));
    check_experts(config, where);
}

/// Reads the nodes of one parsed text; knows how to say where in it a key stands.
class Reader {
public:
    explicit Reader(std::string_view source) : source_(source) {}

    std::string at(const toml::source_region& region) const {
        return source_ + ":" + std::to_string(region.begin.line) + ": ";
    }

    void read(ModelConfig& config, const toml::table& table) const {
        for (const Field& field : kFields) {
            if (const toml::node* node = table.get(field.name))
                std::visit([&](auto member) { assign(config.*member, field.name, *node); },
                           field.member);
            else if (field.required)
                refuse(at(table.source()) + "[model] lacks the key '" + field.name + "'");
        }
    }

    void refuse_unknown(const toml::table& table, const std::vector<std::string>& known,
                        const std::string& place) const {
        for (const auto& [key, node] : table) {
            const std::string name(key.str());
            if (std::find(known.begin(), known.end(), name) == known.end())
                refuse(at(key.source()) + "unknown key " + in_quotes(name) + " " + place +
                       suggestion(name, known));
        }
    }

private:
    [[noreturn]] void wrong_type(const char* key, const toml::node& node, const char* want) const {
        std::ostringstream type;
        type << node.type();
        refuse(at(node.source()) + key + " must be " + want + ", not a value of type '" +
               type.str() + "'");
    }

    void assign(std::uint64_t& out, const char* key, const toml::node& node) const {
        const auto* value = node.as_integer();
        if (!value)
            wrong_type(key, node, "a whole number");
        if (value->get() < 0)
            refuse(at(node.source()) + key + " = " + std::to_string(value->get()) +
                   " must not be negative");
        out = static_cast<std::uint64_t>(value->get());
    }

    void assign(double& out, const char* key, const toml::node& node) const {
        if (const auto* real = node.as_floating_point())
            out = real->get();
        else if (const auto* whole = node.as_integer())
            out = static_cast<double>(whole->get());
        else
            wrong_type(key, node, "a number");
    }

    void assign(bool& out, const char* key, const toml::node& node) const {
        const auto* value = node.as_boolean();
        if (!value)
            wrong_type(key, node, "true or false");
        out = value->get();
    }

    void assign(ScoreFunction& out, const char* key, const toml::node& node) const {
        const auto* value = node.as_string();
        if (value && value->get() == "sigmoid")
            out = ScoreFunction::Sigmoid;
        else if (value && value->get() == "softmax")
            out = ScoreFunction::Softmax;
        else
            wrong_type(key, node, "\"sigmoid\" or \"softmax\"");
    }

    std::string source_;
};

toml::table parse_toml(std::string_view text, std::string_view source) {
    try {
        return toml::parse(text, source);
    } catch (const toml::parse_error& error) {
        refuse(std::string(source) + ":" + std::to_string(error.source().begin.line) + ": " +
               bounded(error.description()));
    }
}

struct Write {
    std::string operator()(std::uint64_t value) const { return number(value); }
    std::string operator()(double value) const { return number(value); }
    std::string operator()(bool value) const { return value ? "true" : "false"; }
    std::string operator()(ScoreFunction value) const {
        return '"' + std::string(to_string(value)) + '"';
    }
};

} // namespace

double ModelConfig::attention_scale() const noexcept {
    return 1 / std::sqrt(static_cast<double>(qk_head_dim()));
}

void validate(const ModelConfig& config) {
    check(config, [](const char*) { return std::string("model: "); });
}

ModelConfig parse_model_config(std::string_view text, std::string_view source,
                               const std::vector<std::string>& other_tables) {
    const toml::table root = parse_toml(text, source);
    const Reader reader(source);
    std::vector<std::string> tables = other_tables;
    tables.insert(tables.begin(), "model");
    reader.refuse_unknown(root, tables, "at the top level");
    const toml::table* model = root["model"].as_table();
    if (!model)
        refuse(std::string(source) + ": has no table [model]");
    std::vector<std::string> keys;
    for (const Field& field : kFields)
        keys.emplace_back(field.name);
    reader.refuse_unknown(*model, keys, "in [model]");

    ModelConfig config;
    reader.read(config, *model);
    check(config, [&](const char* key) {
        const toml::node* node = model->get(key);
        return reader.at(node ? node->source() : model->source());
    });
    return config;
}

ModelConfig load_model_config(const std::filesystem::path& file,
                              const std::vector<std::string>& other_tables) {
    constexpr std::size_t kMaxBytes = 1u << 20;
    std::error_code status;
    if (!std::filesystem::is_regular_file(file, status))
        throw Error(ErrorCode::Io, "cannot read " + file.string() + ": not a file");
    std::ifstream stream(file, std::ios::binary);
    std::string text(kMaxBytes + 1, '\0');
    stream.read(text.data(), static_cast<std::streamsize>(text.size()));
    if (!stream.is_open() || stream.bad())
        throw Error(ErrorCode::Io, "cannot read " + file.string());
    text.resize(static_cast<std::size_t>(stream.gcount()));
    if (text.size() > kMaxBytes)
        refuse(file.string() + " is larger than 1 MiB: not a configuration");
    return parse_model_config(text, file.string(), other_tables);
}

std::string to_toml(const ModelConfig& config) {
    std::string text = "[model]\n";
    for (const Field& field : kFields) {
        text += std::string(field.name) + " = ";
        text += std::visit([&](auto member) { return Write()(config.*member); }, field.member);
        text += '\n';
    }
    return text;
}

std::string suggestion(std::string_view word, const std::vector<std::string>& candidates) {
    constexpr std::size_t kLongest = 100; // of words that a name may be meant by
    std::string best, all;
    std::size_t best_edits = std::numeric_limits<std::size_t>::max();
    for (const std::string& candidate : candidates) {
        all += (all.empty() ? "" : ", ") + candidate;
        if (word.size() > kLongest)
            continue;
        std::vector<std::size_t> row(candidate.size() + 1); // Levenshtein, one row at a time
        for (std::size_t j = 0; j < row.size(); ++j)
            row[j] = j;
        for (std::size_t i = 0; i < word.size(); ++i) {
            std::size_t diagonal = row[0];
            row[0] = i + 1;
            for (std::size_t j = 0; j < candidate.size(); ++j) {
                const std::size_t replace = diagonal + (word[i] != candidate[j]);
                diagonal = row[j + 1];
                row[j + 1] = std::min({replace, row[j] + 1, row[j + 1] + 1});
            }
        }
        if (row.back() < best_edits) {
            best_edits = row.back();
            best = candidate;
        }
    }
    const bool near = word.size() <= kLongest &&
                      best_edits <= std::max<std::size_t>(2, word.size() / 3) &&
                      2 * best_edits <= word.size() + 1;
    return near ? "; did you mean " + in_quotes(best) + "?" : "; there are: " + all;
}

} // namespace bellows
