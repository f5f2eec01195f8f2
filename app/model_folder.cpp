// SPDX-License-Identifier: MIT
#include "app/model_folder.hpp"

#include "app/exit_code.hpp"
#include "app/units.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>
#include <bellows/base/memory_sizes.hpp>
#include <bellows/checkpoint/weights.hpp>
#include <bellows/shape/parameters.hpp>

#include <nlohmann/json.hpp>

#include <array>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <set>
#include <system_error>

namespace bellows {

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::ordered_json;

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::string joined(const std::vector<std::string>& words) {
    std::string all;
    for (const std::string& word : words)
        all += (all.empty() ? "" : ", ") + word;
    return all.empty() ? "none" : all;
}

/// The file of its tokenizer; empty: it has none.
std::string tokenizer_file(const fs::path& folder) {
    std::error_code none;
    for (const char* name : {"tokenizer.json", "tiktoken.model", kTokenizerFile})
        if (fs::exists(folder / name, none))
            return name;
    return "";
}

std::uint64_t files_of(const HfFolder& folder) {
    std::set<std::string> files;
    for (const auto& [name, tensor] : folder.tensors())
        files.insert(tensor.file);
    return files.size();
}

/// How many matrices of linear layers are in which form where they compute in FP8; null where the
/// folder has no FP8 codes.
Json fp8_linear_layers(const HfFolder& folder) {
    if (!folder.config().fp8)
        return nullptr;
    std::array<std::uint64_t, 3> counts{}; // in the order of LinearForm
    const LinearForms forms = linear_forms(folder);
    for (const ParameterInfo& info : parameters(folder.config().model))
        if (is_linear(info))
            ++counts.at(static_cast<std::size_t>(forms(info)));
    return {{"stored_codes", counts[std::size_t(LinearForm::StoredCodes)]},
            {"quantised_at_load", counts[std::size_t(LinearForm::PowerOfTwo)]},
            {"bf16", counts[std::size_t(LinearForm::Plain)]}};
}

Json report_of(const HfFolder& folder) {
    const HfConfig& config = folder.config();
    const ModelConfig& model = config.model;
    Json types = Json::object();
    for (const auto& [name, tensor] : folder.tensors())
        types[to_string(tensor.type)] =
            types.value(to_string(tensor.type), std::uint64_t{0}) + tensor.bytes.size();
    Json report = {{"model", folder.folder().string()}, {"model_type", to_string(config.type)}};
    report.update(shape_report(model));
    report.update({{"max_context", model.max_context},
                   {"vocabulary", model.vocabulary},
                   {"bytes", folder.bytes()},
                   {"files", files_of(folder)},
                   {"bytes_by_type", types},
                   {"fp8_linear_layers", fp8_linear_layers(folder)},
                   {"tokenizer", tokenizer_file(folder.folder())},
                   {"end_tokens", end_tokens(folder.folder(), config)},
                   {"unused_tensors", folder.unused()},
                   {"keys", config.read},
                   {"ignored_keys", config.ignored}});
    return report;
}

void print_text(const HfFolder& folder, const Json& report) {
    const HfConfig& config = folder.config();
    const ModelConfig& model = config.model;
    const auto number = [](std::uint64_t value) { return static_cast<unsigned long long>(value); };
    std::printf("%s: %s, %llu layers, %llu of them dense; %s\n", folder.folder().c_str(),
                to_string(config.type), number(model.layers), number(model.dense_layers),
                describe_experts(model).c_str());
    const auto line = [](const char* what, const std::string& text) {
        std::printf("  %-22s %s\n", what, text.c_str());
    };
    const auto count = [&](const char* what, const char* key) {
        const auto value = report[key].get<std::uint64_t>();
        line(what, std::to_string(value) + "  (" + format_count(double(value)) + ")");
    };
    count("parameters", "parameters");
    count("active per token", "active_parameters_per_token");
    count("embedding and head", "embedding_parameters");
    std::string types;
    for (const auto& [type, bytes] : report["bytes_by_type"].items())
        types += (types.empty() ? "" : ", ") + type + " " + format_bytes(bytes);
    line("stored as", types + ", in " + std::to_string(files_of(folder)) + " files");
    if (const Json& layers = report["fp8_linear_layers"]; layers.is_object())
        line("matrices in FP8", layers["stored_codes"].dump() + " as stored, " +
                                    layers["quantised_at_load"].dump() +
                                    " quantised at load; bf16: " + layers["bf16"].dump());
    line("context", std::to_string(model.max_context) + " tokens");
    line("vocabulary", std::to_string(model.vocabulary));
    const std::string tokenizer = report["tokenizer"];
    line("tokenizer", tokenizer.empty() ? "none" : tokenizer);
    line("ids that end a text", report["end_tokens"].dump());
    line("config.json", std::to_string(config.read.size()) + " keys are understood");
    line("without effect", joined(config.ignored));
    if (!folder.unused().empty())
        line("tensors not used",
             std::to_string(folder.unused().size()) + ", such as " + folder.unused().front());
}

} // namespace

Json shape_report(const ModelConfig& model) {
    const ParameterCount count = count_parameters(model);
    return {{"parameters", count.total},
            {"active_parameters_per_token", count.active},
            {"embedding_parameters", count.embedding},
            {"parameters_per_expert", count.expert},
            {"layers", model.layers},
            {"dense_layers", model.dense_layers},
            {"routed_experts", model.routed_experts},
            {"top_k", model.top_k}};
}

std::string describe_experts(const ModelConfig& model) {
    return model.moe_layers() == 0 ? "no experts"
                                   : std::to_string(model.routed_experts) +
                                         " routed experts, top " + std::to_string(model.top_k) +
                                         ", " + std::to_string(model.shared_experts) + " shared";
}

void ReadingProgress::operator()(std::uint64_t done, std::uint64_t total) const {
    const double seconds = seconds_since(start_);
    const double share = static_cast<double>(done) / static_cast<double>(total);
    progress_->bytes(
        "reading weights",
        done == total ? bytes_ : static_cast<std::uint64_t>(static_cast<double>(bytes_) * share),
        bytes_, seconds);
}

std::string folder_tokenizer(const HfFolder& folder) {
    const std::string file = tokenizer_file(folder.folder());
    constexpr std::uint64_t kBytes = 256;
    if (file.empty() && folder.config().model.vocabulary == kBytes)
        return "bytes";
    if (file.empty())
        throw Error(ErrorCode::InvalidArgument, in_quotes(folder.folder().string()) +
                                                    " has no tokenizer; name one with --tokenizer");
    return folder.folder().string();
}

Precision usual_precision(const HfFolder& folder) {
    return folder.main_type() == StoredType::F32       ? Precision::F32
           : folder.main_type() == StoredType::F8_E4M3 ? Precision::FP8
                                                       : Precision::BF16;
}

int print_folder_info(const fs::path& path, bool json) {
    const HfFolder folder(path);
    const Json report = report_of(folder);
    if (json)
        std::printf("%s\n", report.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
    else
        print_text(folder, report);
    return kExitGood;
}

std::uint64_t parse_size(const std::string& text) {
    struct Unit {
        const char* name;
        std::uint64_t bytes;
    };
    constexpr std::array<Unit, 7> kUnits = {{{"", 1},
                                             {"MB", 1'000'000},
                                             {"GB", 1'000'000'000},
                                             {"TB", 1'000'000'000'000},
                                             {"MiB", std::uint64_t{1} << 20},
                                             {"GiB", std::uint64_t{1} << 30},
                                             {"TiB", std::uint64_t{1} << 40}}};
    constexpr std::uint64_t kLeast = 1'000'000;
    std::uint64_t number = 0, bytes = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    const std::string unit(end, text.data() + text.size());
    for (const Unit& known : kUnits)
        if (error == std::errc() && unit == known.name &&
            !__builtin_mul_overflow(number, known.bytes, &bytes) && bytes >= kLeast)
            return bytes;
    throw Error(ErrorCode::InvalidArgument,
                "--shard-size must be a size of at least 1MB such as 5GB, not " + in_quotes(text));
}

int run_export(const ExportFlags& flags) {
    ExportOptions options;
    if (flags.dtype)
        options.type = parse_export_type(*flags.dtype);
    if (flags.shard_size)
        options.shard_bytes = parse_size(*flags.shard_size);
    ProgressReporter progress(stderr, 0, ProgressReporter::detect(stderr));
    const auto start = std::chrono::steady_clock::now();
    options.on_progress = [&](std::uint64_t done, std::uint64_t total) {
        progress.bytes("writing tensors", done, total, seconds_since(start));
    };
    ExportReport report;
    if (HfFolder::is_one(flags.checkpoint)) {
        report = export_model(HfFolder(flags.checkpoint), flags.out, options);
    } else {
        const Checkpoint checkpoint = Checkpoint::open(flags.checkpoint);
        const RunConfig config = config_of(checkpoint);
        HfOutput output;
        output.max_context = config.train.seq;
        const Tokenizer tokenizer = tokenizer_of(checkpoint, config.train);
        output.bos = tokenizer.bos();
        output.eos.assign(tokenizer.end_tokens().begin(), tokenizer.end_tokens().end());
        report =
            export_model(checkpoint, config.model, output, tokenizer.files(), flags.out, options);
    }
    progress.finish();
    const double seconds = seconds_since(start);
    std::printf("%s: %llu tensors, %s in %llu files, in %s s\n", flags.out.c_str(),
                static_cast<unsigned long long>(report.tensors), format_bytes(report.bytes).c_str(),
                static_cast<unsigned long long>(report.files), printed("%.1f", seconds).c_str());
    return kExitGood;
}

} // namespace bellows
