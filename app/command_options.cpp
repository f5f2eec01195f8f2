// SPDX-License-Identifier: MIT
#include "app/command_line.hpp"
#include "app/commands.hpp"
#include "app/exit_code.hpp"
#include "app/model_folder.hpp"
#include "app/options/config_text.hpp"
#include "app/options/flag_values.hpp"
#include "app/train/initial_model.hpp"
#include "app/train/resumed_checkpoint.hpp"
#include "app/train/training_text.hpp"
#include "app/units.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/base/memory_sizes.hpp>
#include <bellows/checkpoint/expert_tables.hpp>
#include <bellows/comm/launch.hpp>
#include <bellows/model/cached_layer.hpp>
#include <bellows/shape/flops.hpp>
#include <bellows/shape/parameters.hpp>
#include <bellows/shape/presets.hpp>
#include <bellows/train/config_overrides.hpp>
#include <bellows/train/sequence_source.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <string_view>
#include <system_error>
#include <utility>

namespace bellows {

namespace fs = std::filesystem;

RunConfig config_of(const Checkpoint& checkpoint) {
    return parse_run_config(checkpoint.text(kConfigFile),
                            (checkpoint.folder() / kConfigFile).string(), fs::current_path());
}

void check_vocabulary(const ModelConfig& model, const Tokenizer& tokenizer) {
    if (tokenizer.vocabulary() > model.vocabulary) {
        throw Error(ErrorCode::InvalidArgument,
                    "the tokenizer has " + std::to_string(tokenizer.vocabulary()) +
                        " ids, the model a vocabulary of " + std::to_string(model.vocabulary));
    }
}

Tokenizer tokenizer_of(const Checkpoint& checkpoint, const TrainConfig& config) {
    return checkpoint.has_text(kTokenizerFile)
               ? Tokenizer::from_model(checkpoint.text(kTokenizerFile),
                                       (checkpoint.folder() / kTokenizerFile).string())
               : Tokenizer::from_name(config.tokenizer);
}

namespace {

constexpr std::uint64_t kMostPromptBytes = std::uint64_t{64} << 20;

/// Where it is, its configuration, and the tokenizer unless the checkpoint holds it.
void open_model(const GenerateFlags& flags, GenerateOptions& options) {
    if (!HfFolder::is_one(flags.checkpoint)) {
        const Checkpoint checkpoint = Checkpoint::open(flags.checkpoint);
        options.checkpoint = checkpoint.folder();
        options.config = config_of(checkpoint);
        return;
    }
    const HfFolder folder(flags.checkpoint);
    options.checkpoint = folder.folder();
    options.config.model = folder.config().model;
    options.config.train.precision = usual_precision(folder);
    options.folder_bytes = folder.bytes();
    options.tokenizer = flags.tokenizer ? *flags.tokenizer : folder_tokenizer(folder);
    for (const std::uint64_t end : end_tokens(folder.folder(), folder.config()))
        options.text.ends.push_back(static_cast<std::uint32_t>(end));
}

} // namespace

namespace {

/// "-": standard input.
std::string content_or_input(const std::string& file) {
    if (file != "-")
        return read_file(file, kMostPromptBytes);
    std::string text;
    char bytes[1 << 16];
    while (const std::size_t count = std::fread(bytes, 1, sizeof bytes, stdin)) {
        text.append(bytes, count);
        if (text.size() > kMostPromptBytes)
            throw Error(ErrorCode::InvalidArgument,
                        "standard input has more than " + format_bytes(kMostPromptBytes));
    }
    return text;
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = std::min(text.find('\n', at), text.size());
        if (end > at)
            lines.push_back(text.substr(at, end - at));
        at = end + 1;
    }
    return lines;
}

std::vector<std::string> prompts_of(const GenerateFlags& flags) {
    const auto is_input = [](const auto& name) { return name && *name == "-"; };
    if (flags.ranks.value_or(1) > 1 && (is_input(flags.file) || is_input(flags.prompts)))
        throw Error(ErrorCode::InvalidArgument,
                    "several ranks cannot share standard input: put the prompts into a file");
    if (flags.prompt.has_value() + flags.file.has_value() + flags.prompts.has_value() != 1)
        throw Error(ErrorCode::InvalidArgument,
                    "give one of --prompt, --file and --prompts: what the text begins with");
    if (flags.prompt)
        return {*flags.prompt};
    if (flags.file)
        return {content_or_input(*flags.file)};
    std::vector<std::string> lines = lines_of(content_or_input(*flags.prompts));
    if (lines.empty())
        throw Error(ErrorCode::InvalidArgument,
                    "--prompts " + in_quotes(*flags.prompts) + " has no line with a prompt");
    return lines;
}

DType cache_type_of(const std::string& text) {
    if (text == "f32")
        return DType::F32;
    if (text == "bf16")
        return DType::BF16;
    if (text == "fp8")
        return DType::F8E4M3;
    throw Error(ErrorCode::InvalidArgument,
                "there is no --cache-type " + in_quotes(text) + ", there are: f32, bf16, fp8");
}

GenerateOptions resolve_text(const GenerateFlags& flags) {
    GenerateOptions options;
    open_model(flags, options);
    override_with(options.tokenizer, flags.tokenizer);
    if (flags.precision)
        named("precision", [&] { from_text(options.config.train.precision, *flags.precision); });
    validate(options.config.train);
    if (flags.cache_type)
        (void)cache_shape(options.config.model,
                          options.cache_type.emplace(cache_type_of(*flags.cache_type)));
    options.system = flags.system.value_or("");
    TextOptions& text = options.text;
    override_with(text.tokens, flags.tokens);
    if (text.tokens == 0) {
        throw Error(ErrorCode::InvalidArgument, "--tokens must be at least 1");
    }
    SamplingParams& sampling = text.sampling;
    override_with(sampling.temperature, flags.temperature);
    override_with(sampling.seed, flags.seed);
    if (flags.top_k)
        sampling.top_k = static_cast<std::uint32_t>(
            std::min<std::uint64_t>(*flags.top_k, std::numeric_limits<std::uint32_t>::max()));
    override_with(sampling.top_p, flags.top_p);
    override_with(sampling.min_p, flags.min_p);
    override_with(sampling.repetition_penalty, flags.repetition_penalty);
    override_with(sampling.presence_penalty, flags.presence_penalty);
    override_with(sampling.frequency_penalty, flags.frequency_penalty);
    text.stop = flags.stop;
    validate(Request{.prompt = {0}, .sampling = sampling, .stop = text.stop},
             options.config.model.vocabulary);
    text.ignore_end = flags.ignore_end;
    override_with(options.context, flags.context);
    options.exact = flags.exact;
    if (flags.draft)
        options.draft = draft_kind(*flags.draft);
    override_with(options.config.train.device, flags.device);
    return options;
}

} // namespace

GenerateOptions resolve_generate(const GenerateFlags& flags) {
    GenerateOptions options = resolve_text(flags);
    options.prompts = prompts_of(flags);
    options.chat = flags.chat;
    options.json = flags.json;
    options.known_text = flags.data;
    override_with(options.ranks, flags.ranks);
    options.allow_degraded = flags.allow_degraded;
    constexpr std::uint64_t kMostRanks = 4096;
    if (options.ranks == 0 || options.ranks > kMostRanks)
        throw Error(ErrorCode::InvalidArgument, "--ranks must be 1 to " +
                                                    std::to_string(kMostRanks) + ", not " +
                                                    std::to_string(options.ranks));
    if (options.allow_degraded && options.ranks == 1)
        throw Error(ErrorCode::InvalidArgument, "--allow-degraded goes with --ranks");
    if (flags.placement && options.ranks == 1)
        throw Error(ErrorCode::InvalidArgument, "--placement goes with --ranks");
    if (flags.placement)
        options.placement = read_expert_tables(*flags.placement);
    if (!options.system.empty() && !options.chat)
        throw Error(ErrorCode::InvalidArgument, "--system goes with --chat");
    return options;
}

GenerateOptions resolve_chat(const GenerateFlags& flags) {
    constexpr std::uint64_t kUsualTokens = 1024;
    GenerateOptions options = resolve_text(flags);
    if (!flags.tokens)
        options.text.tokens = kUsualTokens;
    options.chat = true;
    options.show_times = flags.times;
    return options;
}

InfoOptions resolve_info(const InfoFlags& flags) {
    if (flags.retune && !flags.kernels) {
        throw Error(ErrorCode::InvalidArgument, "--retune goes with --kernels");
    }
    return {flags.json, flags.device.value_or(""), flags.kernels, flags.retune};
}

namespace {

[[noreturn]] void refuse(const std::string& why) {
    throw Error(ErrorCode::InvalidArgument, why);
}

ScheduleFormat parse_schedule_format(const std::string& format) {
    constexpr std::array<std::string_view, 4> kFormats = {"text", "json", "svg", "trace"};
    const auto found = std::find(kFormats.begin(), kFormats.end(), format);
    if (found == kFormats.end()) {
        refuse("there is no --format " + in_quotes(format) + ", there are: text, json, svg, trace");
    }
    return static_cast<ScheduleFormat>(found - kFormats.begin());
}

PairOptions resolve_pair(const ScheduleFlags& flags) {
    constexpr std::uint64_t kMostLayers = 100;
    if (flags.ranks || flags.micro_batches || flags.chunks || flags.decoupled ||
        flags.early_gradients) {
        refuse("--ranks, --micro-batches, --chunks, --decoupled and --early-gradients are of a "
               "schedule, --pair has none");
    }
    PairOptions options;
    options.layer = parse_pair_costs(flags.costs.value_or(""));
    options.layers = flags.layers.value_or(options.layers);
    if (options.layers == 0 || options.layers > kMostLayers) {
        refuse("--layers must be 1 to " + std::to_string(kMostLayers) + ", not " +
               std::to_string(options.layers));
    }
    if (flags.order) {
        options.order = parse_pattern(*flags.order);
    }
    return options;
}

} // namespace

ScheduleOptions resolve_schedule(const ScheduleFlags& flags) {
    ScheduleOptions options;
    if (flags.kind.has_value() + flags.compare + flags.pair != 1) {
        refuse("--kind names a schedule, or --compare shows all of them, or --pair what a pair of "
               "layers hides");
    }
    options.format = parse_schedule_format(flags.format.value_or("text"));
    options.out = flags.out;
    if (flags.pair) {
        options.pair = resolve_pair(flags);
        return options;
    }
    if (flags.layers || flags.order) {
        refuse("--layers and --order go with --pair");
    }
    options.compare = flags.compare;
    if (flags.kind) {
        options.desc.kind = parse_schedule_kind(*flags.kind);
    }
    if (flags.chunks && flags.kind && options.desc.kind != ScheduleKind::Interleaved) {
        refuse("--chunks goes with --kind interleaved or --compare");
    }
    options.desc.ranks = flags.ranks.value_or(4);
    options.desc.micro_batches = flags.micro_batches.value_or(4 * options.desc.ranks);
    options.desc.chunks = flags.chunks.value_or(2);
    options.costs = parse_costs(flags.costs.value_or(""));
    options.decoupled = flags.decoupled;
    options.early_gradients = flags.early_gradients;
    if (flags.compare && options.format >= ScheduleFormat::Svg) {
        refuse("--compare is shown as text or json");
    }
    return options;
}

ExpertPlanOptions resolve_plan_experts(const PlanExpertsFlags& flags) {
    constexpr std::uint64_t kMostBytes = std::uint64_t{16} << 20;
    constexpr std::uint64_t kMost = 65536;
    ExpertPlanOptions options;
    const auto take = [](std::uint64_t& value, const std::optional<std::uint64_t>& flag,
                         const char* name) {
        override_with(value, flag);
        if (value == 0 || value > kMost)
            refuse(std::string(name) + " must be 1 to " + std::to_string(kMost) + ", not " +
                   std::to_string(value));
    };
    take(options.eplb.groups, flags.groups, "--groups");
    take(options.eplb.nodes, flags.nodes, "--nodes");
    take(options.eplb.ranks, flags.ranks, "--ranks");
    take(options.eplb.replicas, flags.slots, "--slots");
    options.eplb.distinct = flags.distinct;
    options.json = flags.json;
    options.loads = parse_expert_loads(read_file(flags.loads, kMostBytes), flags.loads.string());
    return options;
}

std::string config_text(const ConfigFlags& flags) {
    if (flags.dump.has_value() == flags.list) {
        refuse("give --dump with a preset, or --list");
    }
    if (flags.dump) {
        return commented_toml(load_run_config(*flags.dump), *flags.dump);
    }
    std::string names;
    for (const std::string& name : preset_names()) {
        names += name + "\n";
    }
    return names;
}

int print_model_info(const InfoFlags& flags) {
    if (HfFolder::is_one(*flags.model))
        return print_folder_info(*flags.model, flags.json);
    const ModelConfig model = load_run_config(*flags.model).model;
    if (flags.json) {
        nlohmann::ordered_json json = {{"model", *flags.model}};
        json.update(shape_report(model));
        std::printf("%s\n",
                    json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
        return kExitGood;
    }
    const ParameterCount count = count_parameters(model);
    const auto line = [](const char* what, std::uint64_t value) {
        std::printf("  %-22s %16llu  (%s)\n", what, static_cast<unsigned long long>(value),
                    format_count(static_cast<double>(value)).c_str());
    };
    std::printf("%s: %llu layers, the first %llu dense; %s\n", flags.model->c_str(),
                static_cast<unsigned long long>(model.layers),
                static_cast<unsigned long long>(model.dense_layers),
                describe_experts(model).c_str());
    line("parameters", count.total);
    line("active per token", count.active);
    line("embedding and head", count.embedding);
    if (model.moe_layers() > 0)
        line("one routed expert", count.expert);
    constexpr std::uint64_t kSequence = 4096;
    const FlopsByPart flops = forward_flops(model, mean_visible_keys(kSequence));
    std::printf("  %-22s %16s  (training: %s; causal, sequences of %llu tokens)\n",
                "forward FLOPs a token", format_si(flops.total(), "FLOP").c_str(),
                format_si(training_flops(flops), "FLOP").c_str(),
                static_cast<unsigned long long>(kSequence));
    return kExitGood;
}

} // namespace bellows
