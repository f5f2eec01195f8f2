// SPDX-License-Identifier: MIT
#include "app/train_config.hpp"

#include "app/pair_report.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/comm/message.hpp>
#include <bellows/schedule/pair.hpp>
#include <bellows/schedule/simulate.hpp>
#include <bellows/shape/presets.hpp>

#include <toml++/toml.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <sstream>
#include <type_traits>

namespace bellows {

namespace fs = std::filesystem;

namespace {

constexpr std::uint64_t kAny = std::numeric_limits<std::int64_t>::max(); // what TOML can hold
constexpr double kHuge = std::numeric_limits<double>::max();

/// Calls visit(key, field, least, most) for every field; reading, writing and checking follow it.
template <class Config, class Visit>
void for_each_field(Config& c, Visit&& visit) {
    visit("data", c.data, 0, 0);
    visit("tokenizer", c.tokenizer, 0, 0);
    visit("holdout", c.holdout, 0.0, 0.9);
    visit("steps", c.steps, 1, kAny);
    visit("batch", c.batch, 1, 1 << 24);
    visit("micro_batches", c.micro_batches, 1, 1 << 16);
    visit("seq", c.seq, 1, 1 << 24);
    visit("seed", c.seed, 0, kAny);
    visit("lr", c.lr, 0.0, 1e3);
    visit("lr_min", c.lr_min, 0.0, 1e3);
    visit("warmup_steps", c.warmup_steps, 0, kAny);
    visit("decay_steps", c.decay_steps, 0, kAny);
    visit("beta1", c.beta1, 0.0, 0.999999);
    visit("beta2", c.beta2, 0.0, 0.9999999);
    visit("adam_eps", c.adam_eps, 1e-30, 1.0);
    visit("weight_decay", c.weight_decay, 0.0, 1e3);
    visit("clip_norm", c.clip_norm, 0.0, kHuge);
    visit("precision", c.precision, 0, 0);
    visit("device", c.device, 0, 0);
    visit("device_link", c.device_link, 0, 0);
    visit("pipeline", c.pipeline, 0, 0);
    visit("pairs", c.pairs, 0, 0);
    visit("pp", c.pp, 1, 1 << 16);
    visit("dp", c.dp, 0, 1 << 20);
    visit("ep", c.ep, 0, 1 << 20);
    visit("checkpoint_every", c.checkpoint_every, 0, kAny);
    visit("keep_checkpoints", c.keep_checkpoints, 1, kAny);
    visit("step_timeout", c.step_timeout, 0.001, 1e9);
}

[[noreturn]] void refuse(const std::string& message) {
    throw Error(ErrorCode::InvalidArgument, message);
}

template <class T>
std::string printed(T value) {
    std::ostringstream out;
    out << value;
    return out.str();
}

/// Where a value stands: "source:line: ".
class Place {
public:
    explicit Place(std::string_view source) : source_(source) {}
    std::string of(const toml::node& node) const {
        return source_ + ":" + std::to_string(node.source().begin.line) + ": ";
    }

private:
    std::string source_;
};

void assign(std::uint64_t& out, const toml::node& node, const std::string& where) {
    const auto* value = node.as_integer();
    if (value == nullptr || value->get() < 0) {
        refuse(where + " must be a whole number of at least 0");
    }
    out = static_cast<std::uint64_t>(value->get());
}

void assign(double& out, const toml::node& node, const std::string& where) {
    // Not node.value<double>(), which is empty for whole numbers that no double equals.
    if (const auto* real = node.as_floating_point()) {
        out = real->get();
    } else if (const auto* whole = node.as_integer()) {
        out = static_cast<double>(whole->get());
    } else {
        refuse(where + " must be a number");
    }
}

void assign(std::string& out, const toml::node& node, const std::string& where) {
    const auto* value = node.as_string();
    if (value == nullptr) {
        refuse(where + " must be a text in quotes");
    }
    out = value->get();
}

void assign(std::vector<std::string>& out, const toml::node& node, const std::string& where) {
    const auto* values = node.as_array();
    out.clear();
    if (values == nullptr) { // one path serves without brackets
        assign(out.emplace_back(), node, where);
        return;
    }
    for (const toml::node& value : *values) {
        assign(out.emplace_back(), value, where);
    }
}

/// toml++ writes 1e-08 as "1e-08" and 1.0 as "1.0": both come back as the same double.
template <class T>
void put(toml::table& table, const char* key, const T& value) {
    if constexpr (std::is_same_v<T, std::uint64_t>) {
        table.insert(key, static_cast<std::int64_t>(value));
    } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
        toml::array items;
        for (const std::string& item : value) {
            items.push_back(item);
        }
        table.insert(key, std::move(items));
    } else {
        table.insert(key, value);
    }
}

std::string rebased(const std::string& path, const fs::path& base) {
    return fs::path(path).is_absolute() ? path : (base / path).lexically_normal().string();
}

bool is_uuid(std::string_view text) {
    std::size_t digits = 0;
    for (const char c : text) {
        const bool hex = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
        if (!hex && c != '-') {
            return false;
        }
        digits += hex;
    }
    return digits == 32;
}

} // namespace

void validate(const TrainConfig& config) {
    for_each_field(config, [](const char* key, const auto& value, auto least, auto most) {
        using Value = std::decay_t<decltype(value)>;
        if constexpr (std::is_arithmetic_v<Value>) {
            const auto low = static_cast<Value>(least);
            const auto high = static_cast<Value>(most);
            if (!(value >= low && value <= high)) { // also NaN
                refuse(std::string(key) + " = " + printed(value) + " must be at least " +
                       printed(low) +
                       (high < static_cast<Value>(kAny) ? " and at most " + printed(high) : ""));
            }
        }
    });
    if (config.precision != "f32" && config.precision != "bf16" && config.precision != "fp8") {
        refuse("precision = " + in_quotes(config.precision) +
               " must be \"f32\", \"bf16\" or \"fp8\"");
    }
    if (config.lr_min > config.lr) {
        refuse("lr_min = " + printed(config.lr_min) +
               " must not be above lr = " + printed(config.lr));
    }
    if (config.decay_steps > 0 && config.decay_steps <= config.warmup_steps) {
        refuse("decay_steps = " + std::to_string(config.decay_steps) +
               " must lie after warmup_steps = " + std::to_string(config.warmup_steps));
    }
    (void)parse_devices(config.device);
    (void)device_link_kind(config.device_link);
    try {
        (void)parse_schedule_kind(config.pipeline);
    } catch (const Error& error) {
        refuse("pipeline = " + in_quotes(config.pipeline) + ": " + error.message());
    }
    try {
        if (config.pairs != "auto" && config.pairs != "apart") {
            const PairPattern pattern = parse_pattern(config.pairs);
            check_names(pattern);
            if (pattern.empty()) {
                refuse("it is empty");
            }
        }
    } catch (const Error& error) {
        refuse("pairs = " + in_quotes(config.pairs) +
               " is neither auto nor apart: " + error.message());
    }
}

TrainConfig parse_train_config(std::string_view text, std::string_view source,
                               const fs::path& base) {
    TrainConfig config;
    const Place place(source);
    toml::table table;
    try {
        table = toml::parse(text, source);
    } catch (const toml::parse_error& error) {
        refuse(std::string(source) + ":" + std::to_string(error.source().begin.line) + ": " +
               std::string(error.description()));
    }
    const toml::node* node = table.get("train");
    if (node == nullptr) {
        return config;
    }
    const toml::table* train = node->as_table();
    if (train == nullptr) {
        refuse(place.of(*node) + "train must be a table");
    }
    std::vector<std::string> known;
    for_each_field(config, [&](const char* key, auto& field, auto, auto) {
        known.emplace_back(key);
        if (const toml::node* value = train->get(key)) {
            assign(field, *value, place.of(*value) + key);
        }
    });
    for (const auto& [key, value] : *train) {
        const std::string name(key.str());
        if (std::find(known.begin(), known.end(), name) == known.end()) {
            refuse(place.of(value) + "unknown key " + in_quotes(name) +
                   " in [train]; the nearest valid one is '" + nearest_name(name, known) + "'");
        }
    }
    if (train->contains("data")) {
        for (std::string& path : config.data) {
            path = rebased(path, base);
        }
    }
    if (config.tokenizer != "bytes") {
        config.tokenizer = rebased(config.tokenizer, base);
    }
    return config;
}

std::string to_toml(const TrainConfig& config) {
    std::ostringstream out;
    out << "[train]\n";
    for_each_field(config, [&](const char* key, const auto& value, auto, auto) {
        toml::table one; // a table sorts its keys; one at a time they keep our order
        put(one, key, value);
        out << one << "\n";
    });
    return out.str();
}

RunConfig parse_run_config(std::string_view text, std::string_view source, const fs::path& base) {
    return {parse_model_config(text, source, {"train"}), parse_train_config(text, source, base)};
}

RunConfig load_run_config(const std::string& name) {
    constexpr std::uint64_t kLargestConfig = std::uint64_t{1} << 20;
    std::string names;
    for (const std::string& preset : preset_names()) {
        if (preset == name) {
            return parse_run_config(preset_text(name), "preset " + name, fs::current_path());
        }
        names += (names.empty() ? "" : ", ") + preset;
    }
    const fs::path file(name);
    std::error_code error;
    if (fs::status(file, error).type() == fs::file_type::not_found) {
        refuse(in_quotes(name) + " is neither a configuration file nor a preset (" + names + ")");
    }
    return parse_run_config(read_file(file, kLargestConfig), name,
                            fs::absolute(file).parent_path());
}

std::string to_toml(const RunConfig& config) {
    return to_toml(config.model) + "\n" + to_toml(config.train);
}

namespace {

Schedule usual_schedule(const TrainConfig& config, std::uint64_t ranks) {
    return make_schedule({.kind = parse_schedule_kind(config.pipeline),
                          .ranks = ranks,
                          .micro_batches = config.micro_batches});
}

} // namespace

Schedule pipeline_schedule(const RunConfig& config, const RunLayout& layout) {
    const std::string& pairs = config.train.pairs;
    Schedule schedule = usual_schedule(config.train, layout.pp);
    // With nothing to hide the two of a pair compute one after the other.
    const bool exchanges = layout.ep > 1 && config.model.moe_layers() > 0;
    if (pairs == "apart" || (pairs == "auto" && !exchanges))
        schedule = decouple_pairs(schedule);
    return split_backwards(std::move(schedule)); // a gradient leaves as soon as it is made
}

std::uint64_t usual_micro_batches(const TrainConfig& config, std::uint64_t ranks) {
    const std::uint64_t dp = config.dp == 0 ? ranks / config.pp : config.dp;
    TrainConfig tried = config;
    for (std::uint64_t count = 2 * config.pp; dp > 0 && count * dp <= config.batch; ++count) {
        if (config.batch % (count * dp) != 0) {
            continue;
        }
        tried.micro_batches = count;
        try {
            (void)usual_schedule(tried, config.pp);
            return count;
        } catch (const Error&) { // another number may do
        }
    }
    return 1;
}

RunLayout resolve_layout(const RunConfig& config, std::uint64_t ranks) {
    const TrainConfig& train = config.train;
    const auto text = [](std::uint64_t value) { return std::to_string(value); };
    constexpr std::uint64_t kMostRanks = 1 << 20;
    if (ranks == 0 || ranks > kMostRanks) {
        refuse("ranks = " + text(ranks) + " must be at least 1 and at most " + text(kMostRanks));
    }
    if (ranks % train.pp != 0) {
        refuse(text(ranks) + " ranks cannot be divided into pp = " + text(train.pp) + " stages");
    }
    const std::uint64_t dp = train.dp == 0 ? ranks / train.pp : train.dp;
    if (train.pp * dp != ranks) {
        refuse("pp = " + text(train.pp) + " times dp = " + text(dp) + " makes " +
               text(train.pp * dp) + " ranks, not " + text(ranks));
    }
    const std::uint64_t ep = train.ep == 0 ? dp : train.ep;
    if (dp % ep != 0) {
        refuse("ep = " + text(ep) + " does not divide dp = " + text(dp));
    }
    const std::uint64_t stages = usual_schedule(train, train.pp).num_stages;
    if (stages > 1 && config.model.tied_embeddings) {
        refuse("tied_embeddings needs one stage, pp = " + text(train.pp) +
               " with pipeline = " + in_quotes(train.pipeline) + " makes " + text(stages) +
               ": the table would live on the first and on the last");
    }
    if (stages > config.model.layers) {
        refuse("pp = " + text(train.pp) + " with pipeline = " + in_quotes(train.pipeline) +
               " makes " + text(stages) + " stages, which need as many layers; the model has " +
               text(config.model.layers));
    }
    if (train.batch % (dp * train.micro_batches) != 0) {
        refuse("a batch of " + text(train.batch) + " sequences does not divide into dp = " +
               text(dp) + " times " + text(train.micro_batches) +
               " micro-batches; make it a multiple of " + text(dp * train.micro_batches));
    }
    return {static_cast<std::uint32_t>(train.pp), static_cast<std::uint32_t>(dp),
            static_cast<std::uint32_t>(ep)};
}

DType activation_type(const TrainConfig& config) noexcept {
    return config.precision == "f32" ? DType::F32 : DType::BF16;
}

LinearPrecision linear_precision(const TrainConfig& config) noexcept {
    return config.precision == "fp8" ? LinearPrecision::Fp8 : LinearPrecision::AsActivations;
}

std::chrono::milliseconds wait_limit(const TrainConfig& config) noexcept {
    return std::chrono::milliseconds(static_cast<std::int64_t>(config.step_timeout * 1000));
}

double learning_rate(const TrainConfig& config, std::uint64_t step) {
    if (step < config.warmup_steps) {
        return config.lr * static_cast<double>(step) / static_cast<double>(config.warmup_steps);
    }
    if (config.decay_steps == 0) {
        return config.lr;
    }
    const double done = static_cast<double>(step - config.warmup_steps) /
                        static_cast<double>(config.decay_steps - config.warmup_steps);
    const double cosine = std::cos(std::numbers::pi * std::min(done, 1.0));
    return config.lr_min + (config.lr - config.lr_min) * 0.5 * (1 + cosine);
}

std::vector<std::string> parse_devices(std::string_view text) {
    std::vector<std::string> devices;
    std::string item;
    std::istringstream items{std::string(text)};
    while (std::getline(items, item, ',')) {
        const bool index = !item.empty() && item.size() <= 4 &&
                           item.find_first_not_of("0123456789") == std::string::npos;
        if (!index && item != "gpu" && item != "cpu" && item != kAnyDevice && !is_uuid(item)) {
            refuse("device " + in_quotes(item) +
                   " is not \"any\", \"gpu\", \"cpu\", an index or a UUID");
        }
        devices.push_back(item);
    }
    if (devices.empty() || text.ends_with(',')) {
        refuse("the list of devices " + in_quotes(text) + " has an empty entry");
    }
    return devices;
}

} // namespace bellows
