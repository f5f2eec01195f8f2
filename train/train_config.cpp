// SPDX-License-Identifier: MIT
#include <bellows/train/train_config.hpp>

#include "base/toml_fields.hpp"
#include "model/shape/training_fields.hpp"

#include <bellows/base/files.hpp>
#include <bellows/engine/device_choice.hpp>
#include <bellows/shape/presets.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <sstream>

namespace bellows {

namespace fs = std::filesystem;

// Found by the type of their argument.
static void from_text(DeviceLinkKind& kind, const std::string& text) {
    kind = device_link_kind(text);
}
static const char* to_text(DeviceLinkKind kind) {
    return to_string(kind);
}

namespace {

using toml_fields::kAny;
using toml_fields::printed;
using toml_fields::refuse;

constexpr double kHuge = std::numeric_limits<double>::max();

/// Calls visit(key, field, least, most) for every field; reading, writing and checking follow it.
template <class Config, class Visit>
void for_each_field(Config& c, Visit&& visit) {
    visit("data", c.data, 0, 0);
    visit("tokenizer", c.tokenizer, 0, 0);
    visit("holdout", c.holdout, 0.0, 0.9);
    visit("eval_every", c.eval_every, 0, kAny);
    visit("steps", c.steps, 1, kAny);
    visit("seed", c.seed, 0, kAny);
    visit("lr", c.lr, 0.0, 1e3);
    visit("lr_min", c.lr_min, 0.0, 1e3);
    visit("warmup_steps", c.warmup_steps, 0, kAny);
    visit("lr_schedule", c.lr_schedule, 0, 0);
    visit("decay_start", c.decay_start, 0, kAny);
    visit("decay_steps", c.decay_steps, 0, kAny);
    visit("lr_steps", c.lr_steps, 0, 0);
    visit("lr_factors", c.lr_factors, 0, 0);
    visit("beta1", c.beta1, 0.0, 0.999999);
    visit("beta2", c.beta2, 0.0, 0.9999999);
    visit("adam_eps", c.adam_eps, 1e-30, 1.0);
    visit("weight_decay", c.weight_decay, 0.0, 1e3);
    visit("clip_norm", c.clip_norm, 0.0, kHuge);
    visit("mtp_weight", c.mtp_weight, 0.0, 1e6);
    visit("mtp_late_weight", c.mtp_late_weight, 0.0, 1e6);
    visit("mtp_late_from", c.mtp_late_from, 0, kAny);
    for_each_shape_field(c, visit);
    visit("device", c.device, 0, 0);
    visit("device_link", c.device_link, 0, 0);
    visit("peak_tflops", c.peak_tflops, 0.0, 1e9);
    visit("checkpoint_every", c.checkpoint_every, 0, kAny);
    visit("checkpoint_minutes", c.checkpoint_minutes, 0.0, 1e6);
    visit("keep_checkpoints", c.keep_checkpoints, 1, kAny);
    visit("sample_tokens", c.sample_tokens, 0, 1'000'000);
    visit("tensorboard", c.tensorboard, 0, 1);
    visit("step_timeout", c.step_timeout, 0.001, 1e9);
}

/// What the schedule of the learning rate needs and what it does not have.
void check_rate(const TrainConfig& c) {
    const auto text = [](std::uint64_t value) { return std::to_string(value); };
    const std::string schedule = "lr_schedule = " + in_quotes(to_text(c.lr_schedule));
    const bool decays = c.lr_schedule == LrSchedule::Cosine || c.lr_schedule == LrSchedule::Wsd;
    if (c.decay_steps > 0 && !decays)
        refuse("decay_steps = " + text(c.decay_steps) + " is of no use with " + schedule +
               "; set it to 0");
    if (c.decay_steps > 0 && c.decay_steps <= c.warmup_steps)
        refuse("decay_steps = " + text(c.decay_steps) +
               " must lie after warmup_steps = " + text(c.warmup_steps));
    if (c.decay_start > 0 && (c.decay_start < c.warmup_steps || c.decay_start >= c.decay_steps))
        refuse("decay_start = " + text(c.decay_start) +
               " must lie between warmup_steps = " + text(c.warmup_steps) +
               " and decay_steps = " + text(c.decay_steps) + ", where the decay ends");
    if (c.lr_schedule == LrSchedule::Wsd && c.decay_steps > 0 && c.decay_start == 0)
        refuse(schedule + " needs decay_start, the step up to which the rate stays at lr; set "
                          "decay_steps to 0 while it shall stay");
    if (c.lr_schedule == LrSchedule::Step && c.lr_steps.empty())
        refuse(schedule + " needs lr_steps and lr_factors");
    if (c.lr_schedule == LrSchedule::Constant && !c.lr_steps.empty())
        refuse("lr_steps are of no use with " + schedule + "; take \"step\"");
    if (!std::ranges::is_sorted(c.lr_steps, std::ranges::less_equal{}))
        refuse("lr_steps must ascend");
    if (c.lr_factors.size() != c.lr_steps.size() &&
        (c.lr_factors.size() != 1 || c.lr_steps.empty()))
        refuse("lr_factors has " + text(c.lr_factors.size()) + " factors for " +
               text(c.lr_steps.size()) + " lr_steps; give one for each, or one for all");
    for (const double factor : c.lr_factors)
        if (!(factor > 0 && factor <= 1e3))
            refuse("lr_factors = " + printed(factor) + " must be above 0 and at most 1000");
}

std::string rebased(const std::string& path, const fs::path& base) {
    return fs::path(path).is_absolute() ? path : (base / path).lexically_normal().string();
}

} // namespace

void validate(const TrainConfig& config) {
    for_each_field(config, [](const char* key, const auto& value, auto least, auto most) {
        toml_fields::check_range(key, value, least, most);
    });
    if (config.lr_min > config.lr) {
        refuse("lr_min = " + printed(config.lr_min) +
               " must not be above lr = " + printed(config.lr));
    }
    if (config.eval_every > 0 && config.holdout == 0) {
        refuse("eval_every = " + std::to_string(config.eval_every) +
               " needs text kept out of training: set holdout (--holdout), say to 0.05");
    }
    check_rate(config);
    (void)parse_devices(config.device);
}

TrainConfig parse_train_config(std::string_view text, std::string_view source,
                               const fs::path& base) {
    TrainConfig config;
    const toml_fields::Place place(source);
    const toml::table table = toml_fields::parse(text, source);
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
            toml_fields::assign(field, *value, place.of(*value) + key);
        }
    });
    for (const auto& [key, value] : *train) {
        const std::string name(key.str());
        if (std::find(known.begin(), known.end(), name) == known.end()) {
            refuse(place.of(value) + "unknown key " + in_quotes(name) + " in [train]" +
                   suggestion(name, known));
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
        toml_fields::put(one, key, value);
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

std::chrono::milliseconds wait_limit(const TrainConfig& config) noexcept {
    return std::chrono::milliseconds(static_cast<std::int64_t>(config.step_timeout * 1000));
}

const char* to_text(LrSchedule schedule) noexcept {
    switch (schedule) {
    case LrSchedule::Cosine:
        return "cosine";
    case LrSchedule::Wsd:
        return "wsd";
    case LrSchedule::Step:
        return "step";
    case LrSchedule::Constant:
        return "constant";
    }
    return "unknown";
}

void from_text(LrSchedule& schedule, const std::string& text) {
    for (const LrSchedule one :
         {LrSchedule::Cosine, LrSchedule::Wsd, LrSchedule::Step, LrSchedule::Constant})
        if (text == to_text(one)) {
            schedule = one;
            return;
        }
    refuse(in_quotes(text) + R"( must be "cosine", "wsd", "step" or "constant")");
}

namespace {

/// Without warm-up and factors.
double decayed_rate(const TrainConfig& config, std::uint64_t step) {
    const std::uint64_t begin = std::max(config.decay_start, config.warmup_steps);
    if (config.decay_steps == 0 || step < begin)
        return config.lr;
    const double done = std::min(
        static_cast<double>(step - begin) / static_cast<double>(config.decay_steps - begin), 1.0);
    const double left = config.lr_schedule == LrSchedule::Wsd
                            ? 1 - std::sqrt(done)
                            : 0.5 * (1 + std::cos(std::numbers::pi * done));
    return config.lr_min + (config.lr - config.lr_min) * left;
}

} // namespace

double learning_rate(const TrainConfig& config, std::uint64_t step) {
    if (step < config.warmup_steps)
        return config.lr * static_cast<double>(step) / static_cast<double>(config.warmup_steps);
    double rate = decayed_rate(config, step);
    for (std::size_t i = 0; i < config.lr_steps.size() && step > config.lr_steps[i]; ++i)
        rate *= config.lr_factors[std::min(i, config.lr_factors.size() - 1)];
    return rate;
}

double mtp_weight(const TrainConfig& config, std::uint64_t step) {
    const bool late = config.mtp_late_from > 0 && step >= config.mtp_late_from;
    return late ? config.mtp_late_weight : config.mtp_weight;
}

} // namespace bellows
